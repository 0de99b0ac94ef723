#!/usr/bin/env bash
# llama.cpp's server and quantiser, built for this machine's instructions, and its converter, from the sources in llama-cpp-python's
# package.
#   benchmarks/setup_llamacpp.sh [FOLDER]        default ~/.cache/saccade/peers/llamacpp; 400 MB; a no-op when it is complete
set -euo pipefail
folder=${1:-$HOME/.cache/saccade/peers/llamacpp}
version=0.3.36
complete=$folder/complete-$version-2  # -2: with the change to AMX below
if [ -e "$complete" ] && [ -e "$folder/build/bin/llama-quantize" ]; then exit 0; fi
mkdir -p "$folder"
package=$folder/llama_cpp_python-$version
if [ ! -d "$package" ]; then
  [ -e "$package.tar.gz" ] ||
    "${PYTHON:-python3}" -m pip download --quiet --no-deps --no-binary llama-cpp-python --dest "$folder" "llama-cpp-python==$version"
  tar -xzf "$package.tar.gz" -C "$folder"
fi
ln -sfn "$package/vendor/llama.cpp" "$folder/source"
# GCC 12.2 takes _tile_loadconfig to read 8 of its 64 bytes and leaves the others unwritten: products of AMX then end with an illegal
# instruction.
tiles=$folder/source/ggml/src/ggml-cpu/amx/mmq.cpp
grep -q '"m"(tc)' "$tiles" || sed -i 's/^    _tile_loadconfig(&tc);/    __asm__ volatile("" : : "m"(tc));\n&/' "$tiles"
cmake -S "$folder/source" -B "$folder/build" -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_CURL=OFF -DLLAMA_BUILD_TESTS=OFF \
  -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_OPENSSL=OFF > "$folder/cmake.log" 2>&1
cmake --build "$folder/build" --target llama-server llama-quantize -j "${JOBS:-$(nproc)}" >> "$folder/cmake.log" 2>&1
touch "$complete"
