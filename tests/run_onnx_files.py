"""python run_onnx_files.py WHEELS FOLDER [LIBRARY]: run the models of FOLDER/files.json on the runtime in WHEELS.

LIBRARY holds native kernels for ONNX Runtime.

Their outputs are written to FOLDER. Nothing of this project is imported: the interpreter sees another runtime than it.
"""

import json
import sys
from pathlib import Path

import numpy as np

WHEELS, FOLDER = map(Path, sys.argv[1:3])
LIBRARY = sys.argv[3:]
sys.path.insert(0, str(WHEELS))


def on_onnxruntime(path, feeds):
    import onnxruntime

    assert Path(onnxruntime.__file__).is_relative_to(WHEELS)
    options = onnxruntime.SessionOptions()
    for library in LIBRARY:
        options.register_custom_ops_library(library)
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"]).run(None, feeds)


def on_openvino(path, feeds):
    import openvino

    # Its default on many processors is bfloat16.
    model = openvino.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return list(model(feeds).values())


def on_tract(path, feeds):
    import tract

    model = tract.onnx().load(str(path)).into_model().into_runnable()
    return [output.to_numpy() for output in model.run(list(feeds.values()))]


RUN = {"onnxruntime": on_onnxruntime, "openvino": on_openvino, "tract": on_tract}
(run,) = (RUN[name] for name in RUN if (WHEELS / name).is_dir())
for name, file in json.loads((FOLDER / "files.json").read_text()).items():
    try:
        feeds = {
            i["name"]: np.fromfile(FOLDER / f"{name}.{i['name']}", i["type"]).reshape(i["dims"]) for i in file["inputs"]
        }
        for output, array in zip(file["outputs"], run(FOLDER / f"{name}.onnx", feeds), strict=True):
            np.ascontiguousarray(array).tofile(FOLDER / f"{name}.{output}")
    except Exception as error:
        (FOLDER / f"{name}.error").write_text(str(error))
