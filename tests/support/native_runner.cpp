// Reads the arguments of one product or attention from standard input, runs it with the compiled code, and writes its
// results to standard output: for processors that only an emulator runs. compiled_elsewhere.py writes and reads.

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "native.cpp"

namespace {

template <typename T>
std::vector<T> take(int64_t count) {
    std::vector<T> values(count + 64 / sizeof(T));
    if (fread(values.data(), sizeof(T), count, stdin) != size_t(count)) exit(2);
    return values;
}

void product() {
    const std::vector<int64_t> head = take<int64_t>(17);
    const int64_t n = head[1], k = head[2], rows = head[7], is_bf16 = head[8], operand_ld = head[10],
                  width = is_bf16 ? 2 : 4;
    const auto data = take<char>(head[11]);
    const auto scale = take<float>(head[12]), outer = take<float>(head[13]);
    const auto bf16_scale = take<uint16_t>(head[14]);
    const auto compact = take<int64_t>(head[15]), exceptions = take<int64_t>(head[16]);
    const auto x = take<char>(rows * k * width);
    Weight weight{};
    weight.kind = head[0], weight.n = n, weight.k = k, weight.kpad = head[3], weight.data = data.data();
    weight.gated = head[4], weight.operand = head[5], weight.group = head[6];
    if (head[12]) weight.scale = scale.data();
    if (head[13]) weight.outer = outer.data();
    if (head[14]) weight.bf16_scale = bf16_scale.data();
    weight.compact = compact.data(), weight.exceptions = exceptions.data();
    std::vector<char> out(rows * n * width);
    std::vector<float> operand(rows * operand_ld + 16), scales(rows);
    saccade_linear(
        &weight, x.data(), k, is_bf16, out.data(), n, rows, head[9], 2, operand.data(), operand_ld, scales.data()
    );
    fwrite(out.data(), 1, out.size(), stdout);
}

// The first head of a sequence, as `attend_few` reads it: `before` keys and values are stored in bfloat16, the others
// fresh.
struct FewKeys {
    const float* qkv;  // [rows, 3, heads, width]
    int64_t rows, heads, width, first, before;
    std::vector<uint16_t> stored[2];
    float* out;

    const float* row(int64_t which, int64_t i) const { return qkv + (3 * i + which) * heads * width; }
    void store_keys() {
        for (int64_t side = 0; side < 2; side++)
            for (int64_t i = 0; i < before; i++)
                for (int64_t f = 0; f < width; f++) stored[side].push_back(float_to_bf16(row(1 + side, i)[f]));
    }
    struct KeysAndValues {
        int64_t count, in_pages;
        const uint16_t* stored[2][MAX_SOURCE_KEYS];
        const float* fresh[2];
        int64_t stride;
    };
    KeysAndValues keys_and_values(int64_t at, int64_t count) const {
        KeysAndValues found{count, std::min(std::max<int64_t>(before - at, 0), count), {}, {}, 3 * heads * width};
        for (int64_t side = 0; side < 2; side++) {
            for (int64_t i = 0; i < found.in_pages; i++) found.stored[side][i] = stored[side].data() + (at + i) * width;
            found.fresh[side] = row(1 + side, at + found.in_pages);
        }
        return found;
    }
    const FewKeys& for_head(int64_t) const { return *this; }
    int64_t last(int64_t) const { return rows - 1; }
    int64_t first_key(int64_t) const { return 0; }
    template <typename Cells>
    Words query(Cells, int64_t i, int64_t cell) const {
        return Cells::row(row(0, first + i), width, cell);
    }
    void write(int64_t i, const float* numbers) const { std::copy(numbers, numbers + width, out + i * width); }
};

#if WITH_ATTENTION
// Attention over each of several sequences with products of bfloat16, and for the first head of a single sequence the
// last queries once more, as a decode row has it.
void attention() {
    const std::vector<int64_t> head = take<int64_t>(4);
    const int64_t heads = head[0], width = head[1], sequences = head[2], before = head[3];
    const auto bounds = take<int32_t>(sequences + 1);
    const int64_t rows = bounds[sequences], side = heads * width, count = std::min(rows, MAX_FEW_QUERIES);
    const auto qkv = take<float>(rows * 3 * side);
    std::vector<float> out(rows * side), few(count * width), scratch;
    const float scale = 1.0f / std::sqrt(float(width));
    VarlenAttention all{};
    all.q = qkv.data(), all.k = qkv.data() + side, all.v = qkv.data() + 2 * side, all.out = out.data();
    all.stride = 3 * side, all.head_stride = width, all.out_stride = side, all.kind = BF16;
    all.heads = heads, all.group = 1, all.width = width, all.sequences = sequences, all.bounds = bounds.data(),
    all.scale = scale;
    saccade_varlen_attention(&all, 2);
    fwrite(out.data(), sizeof(float), out.size(), stdout);
    if (sequences > 1 || width % Bf16Cells::EACH) return;
    FewKeys keys{qkv.data(), rows, heads, width, rows - count, before, {}, few.data()};
    keys.store_keys();
    const FewKeys* next = nullptr;
    attend_few<uint16_t>(width, scale, keys, 1, width, count, next, scratch);
    fwrite(few.data(), sizeof(float), few.size(), stdout);
}
#endif

}  // namespace

int main(int, char** arguments) {
    if (std::strcmp(arguments[1], "product") == 0) product();
#if WITH_ATTENTION
    else attention();
#endif
    fflush(stdout);
    _exit(0);  // helpers run on
}
