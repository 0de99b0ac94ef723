// Reads one product from standard input, runs it with the compiled code, and writes its results to standard output: for
// processors that only an emulator runs. compiled_elsewhere.py writes and reads.

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "native.cpp"

template <typename T>
std::vector<T> take(int64_t count) {
    std::vector<T> values(count + 64 / sizeof(T));
    if (fread(values.data(), sizeof(T), count, stdin) != size_t(count)) exit(2);
    return values;
}

int main() {
    const std::vector<int64_t> head = take<int64_t>(14);
    const int64_t n = head[1], k = head[2], rows = head[7], is_bf16 = head[8], operand_ld = head[10], width = is_bf16 ? 2 : 4;
    const auto data = take<char>(head[11]);
    const auto scale = take<float>(head[12]), outer = take<float>(head[13]);
    const auto x = take<char>(rows * k * width);
    Weight weight{head[0], n, k, head[3], data.data(), head[12] ? scale.data() : nullptr, nullptr, head[4], head[5], head[6], nullptr,
                  head[13] ? outer.data() : nullptr};
    std::vector<char> out(rows * n * width);
    std::vector<float> operand(rows * operand_ld + 16), scales(rows);
    saccade_linear(&weight, x.data(), k, is_bf16, out.data(), n, rows, head[9], 2, operand.data(), operand_ld, scales.data());
    fwrite(out.data(), 1, out.size(), stdout);
    fflush(stdout);
    _exit(0);  // helpers run on
}
