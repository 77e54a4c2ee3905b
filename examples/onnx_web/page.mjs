// node page.mjs FOLDER COUNT [BROWSER] < TOKENS: serve the page. With BROWSER (Chromium or Chrome), also open the page
// without a window and print its tokens.
import { spawn } from "node:child_process";
import { createReadStream, existsSync, mkdtempSync, readFileSync, rm } from "node:fs";
import { createServer } from "node:http";
import { tmpdir } from "node:os";
import { join, normalize } from "node:path";

const [folder, count, browser] = process.argv.slice(2);
const tokens = readFileSync(0, "utf8").trim().split(/\s+/);
const types = { html: "text/html", mjs: "text/javascript", wasm: "application/wasm" };
const profile = mkdtempSync(join(tmpdir(), "page-"));
let opened;

const server = createServer(async (request, response) => {
  const path = normalize(new URL(request.url, "http://localhost").pathname);
  if (request.method === "POST") {
    let output = "";
    for await (const part of request) output += part;
    response.end();
    console.log(output);
    if (opened) process.kill(-opened.pid); // end all processes of the browser
    return;
  }
  const here = import.meta.dirname;
  const file = path.startsWith("/model/") ? join(folder, path.slice(7)) : join(here, path === "/" ? "index.html" : path);
  if (!existsSync(file)) return response.writeHead(404).end();
  response.setHeader("Content-Type", types[file.split(".").at(-1)] ?? "application/octet-stream");
  createReadStream(file).pipe(response);
});
server.listen(0, "127.0.0.1", () => {
  const url = `http://127.0.0.1:${server.address().port}/?tokens=${tokens}&count=${count}`;
  if (!browser) return console.log(url);
  const options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", `--user-data-dir=${profile}`];
  opened = spawn(browser, [...options, url], { stdio: "ignore", detached: true });
  opened.on("error", (error) => {
    console.error(String(error));
    process.exitCode = 1;
    server.close();
  });
  opened.on("exit", () => {
    server.close();
    server.closeAllConnections();
    rm(profile, { recursive: true, force: true, maxRetries: 10 }, () => {}); // processes of the browser may still be ending
  });
});
