// Build a pipeline of every text of a folder of scripts/dump_msl.py on this Mac's GPU, from the string and with the
// options that MLX takes, and print what its reflection says beside what the harness of tests/msl says. Fails where a
// text does not compile, its function is missing, or its launch would ask for more threads or memory than there are.
// Registers have no figure of their own: where they are short, a pipeline allows fewer threads.
//
//   swiftc -O tests/msl/pipelines.swift -o pipelines && ./pipelines FOLDER
import Foundation
import Metal

struct Text: Decodable {
  let name: String
  let host_name: String
  let threads: Int
  let threadgroup_memory: Int?
}

struct Manifest: Decodable {
  let header: String
  let texts: [Text]
}

func stop(_ message: String) -> Never {
  FileHandle.standardError.write(Data("pipelines: error: \(message)\n".utf8))
  exit(2)
}

func contents(_ url: URL) -> String {
  guard let text = try? String(contentsOf: url, encoding: .utf8) else { stop("expected a file, got \(url.path).") }
  return text
}

guard CommandLine.arguments.count == 2 else { stop("expected FOLDER, got \(CommandLine.arguments.dropFirst()).") }
let folder = URL(fileURLWithPath: CommandLine.arguments[1], isDirectory: true)
let listed = Data(contents(folder.appendingPathComponent("manifest.json")).utf8)
guard let manifest = try? JSONDecoder().decode(Manifest.self, from: listed) else {
  stop("expected a manifest of scripts/dump_msl.py, got another.")
}
guard let device = MTLCopyAllDevices().first ?? MTLCreateSystemDefaultDevice() else {
  stop("expected a Metal device, got none.")
}

// The language version that MLX takes, by the number of macOS: the names need newer SDKs than some runners have.
let system = ProcessInfo.processInfo.operatingSystemVersion.majorVersion
let language = system >= 26 ? (4 << 16) : system >= 15 ? (3 << 16) + 2 : (3 << 16) + 1
let options = MTLCompileOptions()
options.fastMathEnabled = false
options.languageVersion = MTLLanguageVersion(rawValue: UInt(language))!

func failure(_ text: Text, _ header: String) -> String? {
  let source = header + contents(folder.appendingPathComponent("\(text.name).metal"))
  do {
    let library = try device.makeLibrary(source: source, options: options)
    guard let function = library.makeFunction(name: text.host_name) else {
      return "no function \(text.host_name) among \(library.functionNames)"  // LoveDaisy/ice_halo_sim#139
    }
    let pipeline = try device.makeComputePipelineState(function: function)
    let most = pipeline.maxTotalThreadsPerThreadgroup
    let memory = pipeline.staticThreadgroupMemoryLength
    let expected = text.threadgroup_memory.map { "\($0)" } ?? "?"
    print("\(text.threads)\t\(most)\t\(expected)\t\(memory)\t\(text.name)")
    if most < text.threads { return "\(text.threads) threads are launched, its pipeline allows \(most)" }
    if memory > device.maxThreadgroupMemoryLength { return "\(memory) bytes of threadgroup memory" }
    return nil
  } catch {
    return error.localizedDescription
  }
}

let header = contents(folder.appendingPathComponent(manifest.header))
print("\(device.name), macOS \(system), language version \(language >> 16).\(language & 0xFFFF)")
print("threads\tmost\tharness's bytes\tbytes\ttext")
var failed = 0
for text in manifest.texts {
  if let message = autoreleasepool(invoking: { failure(text, header) }) {
    failed += 1
    print("FAILED \(text.name): \(message)")
  }
}
print("\(manifest.texts.count - failed) of \(manifest.texts.count) pipelines built")
exit(failed == 0 ? 0 : 1)
