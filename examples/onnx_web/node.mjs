// node node.mjs FOLDER COUNT < TOKENS: print COUNT greedy tokens after a prompt of token ids.
import { readFileSync } from "node:fs";
import { join } from "node:path";
import * as ort from "onnxruntime-web";
import { decode, open } from "./decode.mjs";

const [folder, count] = process.argv.slice(2);
const [model, weights] = ["model.onnx", "model.onnx.data"].map((name) => readFileSync(join(folder, name)));
const prompt = readFileSync(0, "utf8").trim().split(/\s+/).map(Number);
const generated = [];
for await (const token of decode(ort, await open(ort, model, weights), prompt, Number(count))) generated.push(token);
console.log(generated.join(" "));
