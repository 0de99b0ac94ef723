#!/usr/bin/env bash
# llama.cpp's server and quantiser, and its converter, from the sources in llama-cpp-python's package.
#   benchmarks/setup_llamacpp.sh [SET] [FOLDER]   default FOLDER ~/.cache/saccade/peers/llamacpp; 400 MB; a no-op when it is complete
# SET: avx2, avx512 or avx512vnni, for a server limited to these instructions; default: native, all that this machine has, which alone
# has the quantiser that files of int8 and int4 weights need.
set -euo pipefail
set=${1:-native}
folder=${2:-$HOME/.cache/saccade/peers/llamacpp}
version=0.3.36
x86=(-DGGML_NATIVE=OFF -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON)
vnni=()
if grep -q avx_vnni /proc/cpuinfo; then vnni=(-DGGML_AVX_VNNI=ON); fi  # our avx2 uses it too, where it exists
case $set in
  native) build=$folder/build flags=(-DGGML_NATIVE=ON) targets=(llama-server llama-quantize) ;;
  avx2) build=$folder/build-avx2 flags=("${x86[@]}" "${vnni[@]}") targets=(llama-server) ;;
  avx512) build=$folder/build-avx512 flags=("${x86[@]}" -DGGML_AVX512=ON) targets=(llama-server) ;;
  avx512vnni) build=$folder/build-avx512vnni flags=("${x86[@]}" -DGGML_AVX512=ON -DGGML_AVX512_VNNI=ON) targets=(llama-server) ;;
  *) echo "SET is '$set'; native, avx2, avx512 and avx512vnni would work" >&2; exit 2 ;;
esac
complete=$build/complete-$version-2  # -2: with the change to AMX below
if [ -e "$complete" ]; then exit 0; fi
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
cmake -S "$folder/source" -B "$build" -DCMAKE_BUILD_TYPE=Release "${flags[@]}" -DLLAMA_CURL=OFF -DLLAMA_BUILD_TESTS=OFF \
  -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_OPENSSL=OFF > "$build.log" 2>&1
cmake --build "$build" --target "${targets[@]}" -j "${JOBS:-$(nproc)}" >> "$build.log" 2>&1
touch "$complete"
