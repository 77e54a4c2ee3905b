#!/bin/sh
# build.sh FOLDER: build FOLDER/decode with the onnxruntime of this Python's environment.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
library=$(python -c 'from pathlib import Path; import onnxruntime; print(next((Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.*[0-9]*")))')
mkdir -p "$1"
case $library in
  *.dylib) name=$(basename "$library") ;;
  *) name=libonnxruntime.so.1 ;;  # the soname of the library
esac
ln -sf "$library" "$1/$name"
${CXX:-c++} -std=c++17 -O1 -Wall -Wextra "$here/decode.cpp" -o "$1/decode" "$1/$name" -Wl,-rpath,"$1"
