# shellcheck shell=bash disable=SC2034 # the scripts that source this file use the variables
# Parse the arguments of gpu_check.sh and mac_check.sh, and define functions for their steps. The variables are `output`
# (an absolute path), `dry_run` and the temporary folder `work`.

refuse() {
  echo "${0##*/}: error: expected $1." >&2
  exit 2
}

output=${0##*/}
output=$PWD/${output%.sh}.jsonl
dry_run=false
while (($#)); do
  case $1 in
    --dry-run) dry_run=true ;;
    -o) [[ ${2-} == *.jsonl ]] || refuse "-o FILE.jsonl, got -o ${2-}"; output=$2 && shift ;;
    -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" && exit ;;
    *) refuse "--dry-run or -o FILE.jsonl, got $1" ;;
  esac
  shift
done
[[ $output == /* ]] || output=$PWD/$output
[[ -d ${output%/*} ]] || refuse "a folder that exists, got ${output%/*}"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Show a command and run it.
run() {
  echo "$ $*"
  $dry_run || "$@"
}

# Show a command and write its output to FILE: save FILE COMMAND...
save() {
  local file=$1
  shift
  echo "$ $* >$file"
  $dry_run || "$@" >"$file"
}
