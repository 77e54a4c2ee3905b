// Decode greedily with an exported model on onnxruntime-web, in Node or in a browser.
const arrays = {
  float32: Float32Array,
  float16: globalThis.Float16Array ?? Uint16Array, // the bits are only passed on, so any 16-bit array works
  int16: Int16Array,
  uint8: Uint8Array,
};
const successor = (past) => past.replace("past_key_values", "present").replace("past_", "present_");

/** Create a session from the bytes of model.onnx and of model.onnx.data. */
export function open(ort, model, weights) {
  ort.env.wasm.numThreads = 1;
  ort.env.logLevel = "error";
  const externalData = [{ path: "model.onnx.data", data: weights }];
  return ort.InferenceSession.create(model, { executionProviders: ["wasm"], externalData });
}

/** Yield `count` token ids after `prompt`, a list of ids. */
export async function* decode(ort, session, prompt, count) {
  const caches = {}; // zeros of the full length
  for (const { name, type, shape } of session.inputMetadata) {
    if (!name.startsWith("past_")) continue;
    const dims = [1, ...shape.slice(1)]; // the batch size is not fixed in the file
    const size = dims.reduce((product, length) => product * length);
    caches[name] = new ort.Tensor(type, new arrays[type](size), dims);
  }
  const row = (numbers) => new ort.Tensor("int64", BigInt64Array.from(numbers, BigInt), [1, numbers.length]);
  let length = 0;
  async function step(tokens) {
    length += tokens.length;
    const ones = row(Array(length).fill(1));
    const outputs = await session.run({ input_ids: row(tokens), attention_mask: ones, ...caches });
    for (const name in caches) caches[name] = outputs[successor(name)];
    const logits = outputs.logits.data;
    return logits.reduce((best, logit, token) => (logit > logits[best] ? token : best), 0);
  }
  if (prompt.length > 1) await step(prompt.slice(0, -1));
  let token = prompt.at(-1); // decode the last prompt token separately, so that its attention is sparse
  for (let i = 0; i < count; i++) yield (token = await step([token]));
}
