#!/usr/bin/env bash
# On a Mac with Xcode: compile every source that scripts/dump_msl.py wrote with Apple's compiler, for each language
# version of the SDK. Warnings are errors. The flags are MLX's flags, and its header is a system header.
#
#   scripts/compile_msl.sh FOLDER [VERSION...]
set -euo pipefail

if (($# < 1)) || [[ ! -f $1/mlx_utils.h ]]; then
  echo "compile_msl.sh: error: expected a folder that scripts/dump_msl.py wrote, got ${1:-none}." >&2
  exit 2
fi
folder=$1
shift
versions=("$@")
((${#versions[@]})) || versions=(metal3.1 metal3.2 metal4.0)

metal=(xcrun -sdk macosx metal)
if ! "${metal[@]}" --version; then
  xcodebuild -downloadComponent MetalToolchain # not part of Xcode 26: actions/runner-images#13014
  "${metal[@]}" --version
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
echo 'kernel void nothing() {}' >"$work/nothing.metal"

# The flags of MLX's own kernels, and -Werror. Some SDKs lack -Wmetal-addr-spaces.
flags=(-x metal -c -fno-fast-math -Wall -Wextra -Werror -Wno-c++17-extensions -Wno-c++20-extensions)
if "${metal[@]}" "${flags[@]}" -Wmetal-addr-spaces "$work/nothing.metal" -o /dev/null 2>"$work/why"; then
  flags+=(-Wmetal-addr-spaces)
fi

compiled=0 status=0
for std in "${versions[@]}"; do
  if ! "${metal[@]}" "-std=$std" -x metal -c "$work/nothing.metal" -o /dev/null 2>"$work/why"; then
    echo "$std: not in this SDK ($(head -n 1 "$work/why"))"
    continue
  fi
  compiled=$((compiled + 1))
  # A message refers to lines of the original kernel files, so print the name of the source, the last argument.
  # shellcheck disable=SC2016 # the inner shell expands these
  if find "$folder" -name '*.metal' -print0 | xargs -0 -n 1 -P "$(getconf _NPROCESSORS_ONLN)" \
    bash -c '"${@:2}" -o /dev/null || { echo "$1 does not compile ${*: -1}"; exit 1; }' \
    bash "$std" "${metal[@]}" "-std=$std" "${flags[@]}" -isystem "$folder" -include mlx_utils.h; then
    echo "$std: $(find "$folder" -name '*.metal' | wc -l | tr -d ' ') sources compile"
  else
    status=1
  fi
done
((compiled)) || { echo "compile_msl.sh: error: expected an SDK with one of ${versions[*]}, got none." >&2 && exit 1; }
exit "$status"
