// node run.mjs MODULES FOLDER: run the models of FOLDER/files.json on onnxruntime-web and write their outputs there.
import { readFileSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join, resolve } from "node:path";

const [modules, folder] = process.argv.slice(2);
const ort = createRequire(resolve(modules, "package.json"))("onnxruntime-web");
ort.env.wasm.numThreads = 1;
ort.env.logLevel = "error";
const arrays = {
  float32: Float32Array,
  float16: globalThis.Float16Array ?? Uint16Array, // the bits, where Node has no such array
  int64: BigInt64Array,
  int32: Int32Array,
  int16: Int16Array,
  uint8: Uint8Array,
};

const files = JSON.parse(readFileSync(join(folder, "files.json"), "utf8"));
for (const [name, file] of Object.entries(files)) {
  try {
    const feeds = {};
    for (const { name: input, type, dims } of file.inputs) {
      const { buffer } = new Uint8Array(readFileSync(join(folder, `${name}.${input}`)));
      feeds[input] = new ort.Tensor(type, new arrays[type](buffer), dims);
    }
    const session = await ort.InferenceSession.create(join(folder, `${name}.onnx`), { executionProviders: ["wasm"] });
    const outputs = await session.run(feeds);
    for (const output of file.outputs) {
      const { data } = outputs[output];
      writeFileSync(join(folder, `${name}.${output}`), new Uint8Array(data.buffer, data.byteOffset, data.byteLength));
    }
    await session.release();
  } catch (error) {
    writeFileSync(join(folder, `${name}.error`), String(error));
  }
}
