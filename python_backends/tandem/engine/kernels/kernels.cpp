// The small operations of a decoder layer on CPU, between the matrix products that oneDNN computes.
//
// Every function exists for float (_f32) and bfloat16 (_bf16); a C interface, so that building takes
// seconds and needs no header of torch. Tensors are row-major, strides count elements.
// Arithmetic is float; results are rounded where transformers rounds them.
//
// Built by build.py with the flags of this CPU; every loop vectorises for AVX2 and AVX-512.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#ifdef __AMX_BF16__
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

struct bf16 {
    uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) { return std::bit_cast<float>(uint32_t(x.bits) << 16); }

template <class T>
inline T from_float(float x);
template <>
inline float from_float<float>(float x) { return x; }
template <>
inline bf16 from_float<bf16>(float x) {  // to nearest, ties to even
    uint32_t bits = std::bit_cast<uint32_t>(x);
    return {uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

template <class T>
inline float rounded(float x) { return to_float(from_float<T>(x)); }

// exp for x <= 0 and above -87 (below: 0 within float). Cephes' polynomial, relative error 2e-7.
inline float exp_of(float x) {
    x = std::min(std::max(x, -87.0f), 88.0f);
    float n = std::nearbyint(x * 1.44269504f);
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float y = 1.9875691500e-4f;
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    return y * std::bit_cast<float>((int32_t(n) + 127) << 23);
}

constexpr int64_t kSerialElements = 1 << 14;  // less is not worth waking threads for

// out = x / rms(x) * weight, per row. With residual: residual += x first, and that is normalised.
template <class T>
void rms_norm(T* out, const T* x, T* residual, const T* weight, int64_t rows, int64_t size,
              int64_t x_stride, int64_t out_stride, float eps) {
#pragma omp parallel for if (rows * size > kSerialElements)
    for (int64_t row = 0; row < rows; row++) {
        const T* in = x + row * x_stride;
        T* to = out + row * out_stride;
        if (residual) {
            T* sum = residual + row * size;
#pragma omp simd
            for (int64_t i = 0; i < size; i++)
                sum[i] = from_float<T>(to_float(sum[i]) + to_float(in[i]));
            in = sum;
        }
        float squares = 0;
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < size; i++) squares += to_float(in[i]) * to_float(in[i]);
        float scale = 1.0f / std::sqrt(squares / size + eps);
#pragma omp simd
        for (int64_t i = 0; i < size; i++)
            to[i] = from_float<T>(rounded<T>(to_float(in[i]) * scale) * to_float(weight[i]));
    }
}

// x[row, head, :] turned by cos and sin [rows, head_dim], in place; the halves form the pairs.
template <class T>
void rotate(T* x, const T* cos, const T* sin, int64_t rows, int64_t num_heads, int64_t head_dim,
            int64_t row_stride) {
    const int64_t half = head_dim / 2;
#pragma omp parallel for if (rows * num_heads * head_dim > kSerialElements)
    for (int64_t row = 0; row < rows; row++) {
        const T *c = cos + row * head_dim, *s = sin + row * head_dim;
        for (int64_t head = 0; head < num_heads; head++) {
            T* a = x + row * row_stride + head * head_dim;
            T* b = a + half;
#pragma omp simd
            for (int64_t i = 0; i < half; i++) {
                float first = to_float(a[i]), second = to_float(b[i]);
                a[i] = from_float<T>(rounded<T>(first * to_float(c[i])) -
                                     rounded<T>(second * to_float(s[i])));
                b[i] = from_float<T>(rounded<T>(second * to_float(c[half + i])) +
                                     rounded<T>(first * to_float(s[half + i])));
            }
        }
    }
}

// out[row, i] = silu(gate) * up, where a row of gate_up is gate and then up.
template <class T>
void silu_mul(T* out, const T* gate_up, int64_t rows, int64_t size) {
#pragma omp parallel for if (rows * size > kSerialElements)
    for (int64_t row = 0; row < rows; row++) {
        const T *gate = gate_up + row * 2 * size, *up = gate + size;
        T* to = out + row * size;
#pragma omp simd
        for (int64_t i = 0; i < size; i++) {
            float g = to_float(gate[i]);
            to[i] = from_float<T>(rounded<T>(g / (1.0f + exp_of(-g))) * to_float(up[i]));
        }
    }
}

// Copies the key and the value [num_kv_heads * head_dim] of each row to its slot.
template <class T>
void store_kv(T* keys, T* values, const T* key, const T* value, const int64_t* slots, int64_t rows,
              int64_t size, int64_t row_stride) {
#pragma omp parallel for if (rows * size > kSerialElements)
    for (int64_t row = 0; row < rows; row++) {
        std::copy_n(key + row * row_stride, size, keys + slots[row] * size);
        std::copy_n(value + row * row_stride, size, values + slots[row] * size);
    }
}

// One layer of a paged KV cache. A block holds block_size keys [num_kv_heads, head_dim] in a row;
// the same layer of the next block is block_stride elements further.
template <class T>
struct Cache {
    const T *keys, *values;
    int64_t block_stride, block_size, num_kv_heads, head_dim;

    int64_t offset(const int64_t* table, int64_t token, int64_t kv_head) const {
        return table[token / block_size] * block_stride +
               (token % block_size * num_kv_heads + kv_head) * head_dim;
    }
};

// The tokens of this step, sequence after sequence. The last query token of a sequence is the last
// token of its context; each sees the tokens up to itself, with a window only the nearest ones.
struct Step {
    const int64_t *query_starts, *query_lens, *context_lens, *tables, *table_starts;
    int64_t num_sequences, num_heads, query_stride, window;
    float scaling, softcap;

    int64_t position(int64_t sequence, int64_t query) const {
        return context_lens[sequence] - query_lens[sequence] + query;
    }
    int64_t first_key(int64_t position) const {
        return window > 0 ? std::max<int64_t>(0, position + 1 - window) : 0;
    }
};

// One query token and the group of heads that share one KV head. kDim is 0 or the head_dim.
template <class T, int kDim>
void attend_one(T* out, const T* query, const Cache<T>& cache, const int64_t* table, int64_t kv_head,
                int64_t first, int64_t last, int64_t group, float scaling, float softcap) {
    const int64_t dim = kDim ? kDim : cache.head_dim, count = last - first;
    thread_local std::vector<float> memory;
    memory.resize(group * (count + 2 * dim) + dim);
    float* scores = memory.data();            // [group, count]
    float* queries = scores + group * count;  // [group, dim]
    float* sums = queries + group * dim;      // [group, dim]
    float* row = sums + group * dim;          // [dim]
    for (int64_t i = 0; i < group * dim; i++) queries[i] = to_float(query[i]) * scaling;
    std::fill_n(sums, group * dim, 0.0f);

    for (int64_t t = 0; t < count; t++) {
        const T* key = cache.keys + cache.offset(table, first + t, kv_head);
#pragma omp simd
        for (int64_t i = 0; i < dim; i++) row[i] = to_float(key[i]);
        for (int64_t g = 0; g < group; g++) {
            const float* q = queries + g * dim;
            float dot = 0;
#pragma omp simd reduction(+ : dot)
            for (int64_t i = 0; i < dim; i++) dot += q[i] * row[i];
            scores[g * count + t] = dot;
        }
    }
    for (int64_t g = 0; g < group; g++) {
        float* score = scores + g * count;
        if (softcap > 0)
            for (int64_t t = 0; t < count; t++) score[t] = softcap * std::tanh(score[t] / softcap);
        float most = -std::numeric_limits<float>::max(), total = 0;
#pragma omp simd reduction(max : most)
        for (int64_t t = 0; t < count; t++) most = std::max(most, score[t]);
#pragma omp simd reduction(+ : total)
        for (int64_t t = 0; t < count; t++) {
            score[t] = exp_of(score[t] - most);
            total += score[t];
        }
        float inverse = 1.0f / total;
#pragma omp simd
        for (int64_t t = 0; t < count; t++) score[t] *= inverse;
    }
    for (int64_t t = 0; t < count; t++) {
        const T* value = cache.values + cache.offset(table, first + t, kv_head);
#pragma omp simd
        for (int64_t i = 0; i < dim; i++) row[i] = to_float(value[i]);
        for (int64_t g = 0; g < group; g++) {
            float weight = scores[g * count + t];
            float* sum = sums + g * dim;
#pragma omp simd
            for (int64_t i = 0; i < dim; i++) sum[i] += weight * row[i];
        }
    }
    for (int64_t i = 0; i < group * dim; i++) out[i] = from_float<T>(sums[i]);
}

template <class T, int kDim>
void attend_each(T* out, const T* query, const Cache<T>& cache, const Step& step) {
    const int64_t group = step.num_heads / cache.num_kv_heads;
    struct Unit {
        int64_t sequence, query;
    };
    std::vector<Unit> units;
    for (int64_t s = 0; s < step.num_sequences; s++)
        for (int64_t q = 0; q < step.query_lens[s]; q++) units.push_back({s, q});
#pragma omp parallel for schedule(dynamic) collapse(2)
    for (size_t i = 0; i < units.size(); i++) {
        for (int64_t kv_head = 0; kv_head < cache.num_kv_heads; kv_head++) {
            const auto [s, q] = units[i];
            const int64_t row = step.query_starts[s] + q, position = step.position(s, q);
            const int64_t head = kv_head * group * cache.head_dim;
            attend_one<T, kDim>(out + row * step.num_heads * cache.head_dim + head,
                                query + row * step.query_stride + head, cache,
                                step.tables + step.table_starts[s], kv_head,
                                step.first_key(position), position + 1, group, step.scaling,
                                step.softcap);
        }
    }
}

template <class T>
void attention(T* out, const T* query, const Cache<T>& cache, const Step& step) {
    if (cache.head_dim == 64) return attend_each<T, 64>(out, query, cache, step);
    if (cache.head_dim == 128) return attend_each<T, 128>(out, query, cache, step);
    attend_each<T, 0>(out, query, cache, step);
}

#ifdef __AMX_BF16__

// Attention on AMX tiles. A tile has 16 rows of 64 bytes: 16 x 16 floats or 16 x 32 bfloat16.
//
//   scores  [key, row]    = K [key, dim]   * Q^T [dim, row]     K straight from the cache
//   sums    [dim, row]   += V^T [dim, key] * P^T [key, row]     softmax over keys goes down a column
//
// A row is one (query token, head of the group): in a decode step a tile holds the group of one
// token, in a prefill 16 / group tokens. The softmax is computed chunk by chunk (Milakov and
// Gimelshein, arXiv 1805.02867; FlashAttention, arXiv 2205.14135).
namespace amx {

constexpr int64_t kTile = 16, kChunk = 128, kUnitTiles = 12;

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Asks the kernel for the tile registers; false where it refuses.
inline bool enable() {
    constexpr int kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// 2^x for x <= 0, relative error 3e-6 (least squares on [-1/2, 1/2]): more than bfloat16 keeps. Far
// below it gives 2^-120 instead of 0, which no sum of weights from 0 to 1 notices; denormal numbers,
// which are slow, do not come about.
inline __m512 exp2_of(__m512 x) {
    x = _mm512_max_ps(x, _mm512_set1_ps(-120.0f));
    const __m512 n = _mm512_roundscale_ps(x, 8);
    const __m512 r = _mm512_sub_ps(x, n);
    __m512 y = _mm512_set1_ps(9.56051021e-3f);
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(5.59170392e-2f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(2.40249811e-1f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(6.93121968e-1f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(9.99999191e-1f));
    return _mm512_scalef_ps(y, n);
}

inline void transpose(__m512i x[16]) {  // 16 x 16 of 32 bits
    __m512i y[16];
    for (int i = 0; i < 16; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
        x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
        x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
        x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        y[i] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0x88);
        y[i + 4] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0xdd);
        y[i + 8] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0x88);
        y[i + 12] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0xdd);
    }
    for (int i = 0; i < 8; i++) {
        x[i] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0x88);
        x[i + 8] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0xdd);
    }
}

// The rows of one unit of work and what has been summed up for them.
struct Tile {
    __m512 most, total;  // [row]
    __m512i position;    // [row] int32; the largest where the tile has no row
    int64_t end;         // the first key that no row sees
};

// What one thread needs; reused from call to call.
struct Scratch {
    std::vector<char> memory;
    uint32_t* queries;  // [tile, dim / 2, row]   pairs of bfloat16
    float* sums;        // [tile, dim, row]
    uint32_t* values;   // [dim, kChunk / 2]      pairs of keys
    float* scores;      // [kChunk, row]
    uint32_t* weights;  // [kChunk / 2, row]      pairs of keys
    Tile tiles[kUnitTiles];

    void reserve(int64_t dim) {
        const int64_t query_bytes = kUnitTiles * dim / 2 * 64, sum_bytes = kUnitTiles * dim * 64;
        const int64_t value_bytes = dim * kChunk * 2;
        memory.resize(query_bytes + sum_bytes + value_bytes + kChunk * 64 + kChunk * 32 + 64);
        char* at = memory.data() + (-reinterpret_cast<uintptr_t>(memory.data()) & 63);
        queries = reinterpret_cast<uint32_t*>(at);
        sums = reinterpret_cast<float*>(at += query_bytes);
        values = reinterpret_cast<uint32_t*>(at += sum_bytes);
        scores = reinterpret_cast<float*>(at += value_bytes);
        weights = reinterpret_cast<uint32_t*>(at += kChunk * 64);
    }
};

// Up to four tiles A [16, 32 * steps] times one B, into tiles 0 to 3: consecutive products do not
// wait for each other.
inline void multiply(const void* const a[4], int64_t a_stride, int64_t a_step, const uint32_t* b,
                     int64_t steps, int64_t num_a) {
    for (int64_t k = 0; k < steps; k++) {
        _tile_loadd(6, b + k * kTile * kTile, 64);
#define MULTIPLY(i, a_tile)                                                             \
    if (num_a > i) {                                                                    \
        _tile_loadd(a_tile, static_cast<const char*>(a[i]) + k * a_step, a_stride);     \
        _tile_dpbf16ps(i, a_tile, 6);                                                   \
    }
        MULTIPLY(0, 4) MULTIPLY(1, 5) MULTIPLY(2, 4) MULTIPLY(3, 5)
#undef MULTIPLY
    }
}

#define EACH_TILE(count, statement)      \
    do {                                 \
        if (count > 0) statement(0);     \
        if (count > 1) statement(1);     \
        if (count > 2) statement(2);     \
        if (count > 3) statement(3);     \
    } while (0)

// scores[key, row] of the keys start .. start + count, count a multiple of 16.
inline void multiply_keys(Scratch& scratch, const uint32_t* queries, const Cache<bf16>& cache,
                          const int64_t* table, int64_t kv_head, int64_t start, int64_t count) {
    for (int64_t key = 0; key < count; key += 4 * kTile) {
        const int64_t num_tiles = std::min<int64_t>(4, (count - key) / kTile);
        const void* keys[4] = {};
        for (int64_t i = 0; i < num_tiles; i++)
            keys[i] = cache.keys + cache.offset(table, start + key + i * kTile, kv_head);
        float* to = scratch.scores + key * kTile;
#define ZERO(i) _tile_zero(i)
#define STORE(i) _tile_stored(i, to + i * kTile * kTile, 64)
        EACH_TILE(num_tiles, ZERO);
        multiply(keys, cache.num_kv_heads * cache.head_dim * 2, 64, queries, cache.head_dim / 32,
                 num_tiles);
        EACH_TILE(num_tiles, STORE);
#undef ZERO
#undef STORE
    }
}

// Turns scores into weights (pairs of keys, up to a multiple of 32) and rescales the sums. Raw scores
// count: the scaling, which is positive, goes into the exponent, and that is one of 2.
inline void soften(Scratch& scratch, Tile& tile, float* sums, int64_t dim, int64_t start,
                   int64_t count, bool is_masked, int64_t window, float scaling) {
    const __m512 scale = _mm512_set1_ps(scaling * 1.44269504f), none = _mm512_set1_ps(-INFINITY);
    float* const scores = scratch.scores;
    uint32_t* const weights = scratch.weights;
    const int64_t end = (count + 31) / 32 * 32;
    if (is_masked) {
        const __m512i oldest = _mm512_sub_epi32(tile.position, _mm512_set1_epi32(int32_t(window)));
        for (int64_t key = 0; key < count; key++) {
            const __m512i at = _mm512_set1_epi32(int32_t(start + key));
            __mmask16 is_seen = _mm512_cmple_epi32_mask(at, tile.position);
            if (window > 0) is_seen &= _mm512_cmpgt_epi32_mask(at, oldest);
            float* score = scores + key * kTile;
            _mm512_store_ps(score, _mm512_mask_mov_ps(none, is_seen, _mm512_load_ps(score)));
        }
    }
    for (int64_t key = count; key < end; key++) _mm512_store_ps(scores + key * kTile, none);
    __m512 mosts[4] = {tile.most, tile.most, tile.most, tile.most};
    for (int64_t key = 0; key < end; key += 4)
        for (int i = 0; i < 4; i++)
            mosts[i] = _mm512_max_ps(mosts[i], _mm512_load_ps(scores + (key + i) * kTile));
    const __m512 most =
        _mm512_max_ps(_mm512_max_ps(mosts[0], mosts[1]), _mm512_max_ps(mosts[2], mosts[3]));
    if (_mm512_cmp_ps_mask(most, tile.most, _CMP_NEQ_UQ)) {
        const __m512 factor = exp2_of(_mm512_mul_ps(_mm512_sub_ps(tile.most, most), scale));
        tile.total = _mm512_mul_ps(tile.total, factor);
        for (int64_t d = 0; d < dim * kTile; d += kTile)
            _mm512_store_ps(sums + d, _mm512_mul_ps(_mm512_load_ps(sums + d), factor));
        tile.most = most;
    }
    const __m512 shift = _mm512_mul_ps(most, scale);
    auto weight_of = [&](int64_t key) {
        return exp2_of(_mm512_fmsub_ps(_mm512_load_ps(scores + key * kTile), scale, shift));
    };
    auto to_bf16 = [](__m512 x) {
        return _mm512_cvtepu16_epi32(std::bit_cast<__m256i>(_mm512_cvtneps_pbh(x)));
    };
    __m512 totals[2] = {tile.total, _mm512_setzero_ps()};
    for (int64_t key = 0; key < end; key += 2) {
        const __m512 first = weight_of(key), second = weight_of(key + 1);
        totals[0] = _mm512_add_ps(totals[0], first);
        totals[1] = _mm512_add_ps(totals[1], second);
        _mm512_store_si512(weights + key / 2 * kTile,
                           _mm512_or_si512(to_bf16(first), _mm512_slli_epi32(to_bf16(second), 16)));
    }
    tile.total = _mm512_add_ps(totals[0], totals[1]);
}

// Asks for the keys and values of up to 32 tokens from start, to have them when they are needed.
inline void prefetch(const Cache<bf16>& cache, const int64_t* table, int64_t kv_head, int64_t start,
                     int64_t end) {
    for (int64_t half = start; half < std::min(start + 2 * kTile, end); half += kTile) {
        const int64_t offset = cache.offset(table, half, kv_head);
        for (int64_t i = 0; i < kTile; i++) {
            const int64_t row = offset + i * cache.num_kv_heads * cache.head_dim;
            for (int64_t d = 0; d < cache.head_dim; d += 32) {
                _mm_prefetch(reinterpret_cast<const char*>(cache.keys + row + d), _MM_HINT_T0);
                _mm_prefetch(reinterpret_cast<const char*>(cache.values + row + d), _MM_HINT_T0);
            }
        }
    }
}

// values[dim, key] of the keys start .. start + count; zeros up to a multiple of 32, because what
// lies behind the last token may be no number. The sequence goes on up to end.
inline void transpose_values(Scratch& scratch, const Cache<bf16>& cache, const int64_t* table,
                             int64_t kv_head, int64_t start, int64_t count, int64_t end) {
    alignas(64) static const bf16 zeros[256] = {};
    const int64_t row = cache.num_kv_heads * cache.head_dim;
    for (int64_t key = 0; key < count; key += 2 * kTile) {
        prefetch(cache, table, kv_head, start + key + 2 * kTile, end);
        const bf16* rows[2 * kTile];
        std::fill_n(rows, 2 * kTile, zeros);
        for (int64_t half = key; half < std::min(key + 2 * kTile, count); half += kTile) {
            const bf16* first = cache.values + cache.offset(table, start + half, kv_head);
            for (int64_t i = 0; i < std::min(kTile, count - half); i++)
                rows[half - key + i] = first + i * row;
        }
        for (int64_t dim = 0; dim < cache.head_dim; dim += kTile) {
            auto load = [&](int64_t i) {
                return _mm512_cvtepu16_epi32(
                    _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[i] + dim)));
            };
            __m512i pairs[16];
            for (int64_t i = 0; i < kTile; i++)
                pairs[i] = _mm512_or_si512(load(2 * i), _mm512_slli_epi32(load(2 * i + 1), 16));
            transpose(pairs);
            for (int64_t i = 0; i < kTile; i++)
                _mm512_store_si512(scratch.values + (dim + i) * kChunk / 2 + key / 2, pairs[i]);
        }
    }
}

// sums[dim, row] += values[dim, key] * weights[key, row], count keys.
inline void multiply_values(Scratch& scratch, float* sums, int64_t head_dim, int64_t count) {
    for (int64_t dim = 0; dim < head_dim; dim += 4 * kTile) {
        const int64_t num_tiles = std::min<int64_t>(4, (head_dim - dim) / kTile);
        const void* values[4] = {};
        for (int64_t i = 0; i < num_tiles; i++)
            values[i] = scratch.values + (dim + i * kTile) * kChunk / 2;
        float* to = sums + dim * kTile;
#define LOAD(i) _tile_loadd(i, to + i * kTile * kTile, 64)
#define STORE(i) _tile_stored(i, to + i * kTile * kTile, 64)
        EACH_TILE(num_tiles, LOAD);
        multiply(values, kChunk * 2, 64, scratch.weights, (count + 31) / 32, num_tiles);
        EACH_TILE(num_tiles, STORE);
#undef LOAD
#undef STORE
    }
}

// Some rows (of query_len * group) of a sequence, for one or more KV heads.
struct Unit {
    int64_t sequence, first_head, num_heads, first_row, num_rows;

    int64_t tiles_per_head() const { return (num_rows + kTile - 1) / kTile; }
};

inline void attend_unit(bf16* out, const bf16* query, const Cache<bf16>& cache, const Step& step,
                        const Unit& unit, Scratch& scratch) {
    const int64_t dim = cache.head_dim, group = step.num_heads / cache.num_kv_heads;
    const int64_t num_tiles = unit.num_heads * unit.tiles_per_head();
    const int64_t* table = step.tables + step.table_starts[unit.sequence];
    auto head_of = [&](int64_t tile) { return unit.first_head + tile / unit.tiles_per_head(); };
    auto row_of = [&](int64_t tile, int64_t i) { return tile % unit.tiles_per_head() * kTile + i; };
    auto token_of = [&](int64_t row) { return (unit.first_row + row) / group; };
    auto offset_of = [&](int64_t tile, int64_t row) {  // of a row's head in its token
        return (head_of(tile) * group + (unit.first_row + row) % group) * dim;
    };
    auto packed_row = [&](int64_t row) {
        return step.query_starts[unit.sequence] + token_of(row);
    };
    for (int64_t t = 0; t < num_tiles; t++) {
        const bf16* rows[kTile];
        alignas(64) int32_t positions[kTile];
        int64_t end = 0;
        for (int64_t i = 0; i < kTile; i++) {
            const int64_t row = row_of(t, i);
            const bool is_row = row < unit.num_rows;
            rows[i] = is_row ? query + packed_row(row) * step.query_stride + offset_of(t, row)
                             : nullptr;
            positions[i] = is_row ? int32_t(step.position(unit.sequence, token_of(row)))
                                  : std::numeric_limits<int32_t>::max();
            if (is_row) end = std::max<int64_t>(end, positions[i] + 1);
        }
        for (int64_t d = 0; d < dim; d += 32) {
            __m512i pairs[16];
            for (int64_t i = 0; i < kTile; i++)
                pairs[i] = rows[i] ? _mm512_loadu_si512(rows[i] + d) : _mm512_setzero_si512();
            transpose(pairs);
            for (int64_t i = 0; i < kTile; i++)
                _mm512_store_si512(scratch.queries + (t * dim / 2 + d / 2 + i) * kTile, pairs[i]);
        }
        scratch.tiles[t] = {_mm512_set1_ps(-std::numeric_limits<float>::max()),
                            _mm512_setzero_ps(), _mm512_load_si512(positions), end};
    }
    std::fill_n(scratch.sums, num_tiles * dim * kTile, 0.0f);

    const int64_t first_position = step.position(unit.sequence, token_of(0));
    const int64_t last_position = step.position(unit.sequence, token_of(unit.num_rows - 1));
    const int64_t end = last_position + 1;
    for (int64_t start = step.first_key(first_position) / kTile * kTile; start < end;
         start += kChunk) {
        const int64_t count = std::min(kChunk, end - start);
        const bool is_masked = start + count > first_position + 1 ||
                               step.first_key(last_position) > start;
        for (int64_t t = 0; t < num_tiles; t++) {
            if (t % unit.tiles_per_head() == 0)
                transpose_values(scratch, cache, table, head_of(t), start, count, end);
            Tile& tile = scratch.tiles[t];
            const int64_t seen = std::min(count, tile.end - start);
            if (seen <= 0) continue;
            float* sums = scratch.sums + t * dim * kTile;
            multiply_keys(scratch, scratch.queries + t * dim / 2 * kTile, cache, table,
                          head_of(t), start, (seen + kTile - 1) / kTile * kTile);
            soften(scratch, tile, sums, dim, start, seen, is_masked, step.window, step.scaling);
            multiply_values(scratch, sums, dim, seen);
        }
    }
    for (int64_t t = 0; t < num_tiles; t++) {
        const __m512 inverse = _mm512_div_ps(_mm512_set1_ps(1.0f), scratch.tiles[t].total);
        for (int64_t d = 0; d < dim; d += kTile) {
            __m512i rows[16];
            for (int64_t i = 0; i < kTile; i++)
                rows[i] = _mm512_castps_si512(_mm512_mul_ps(
                    _mm512_load_ps(scratch.sums + (t * dim + d + i) * kTile), inverse));
            transpose(rows);
            for (int64_t i = 0; i < std::min(kTile, unit.num_rows - row_of(t, 0)); i++) {
                const int64_t row = row_of(t, i);
                bf16* to = out + packed_row(row) * step.num_heads * dim + offset_of(t, row) + d;
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                                    std::bit_cast<__m256i>(_mm512_cvtneps_pbh(
                                        _mm512_castsi512_ps(rows[i]))));
            }
        }
    }
}

// The heads of a few rows go together, because their keys lie side by side in the cache.
inline void attention(bf16* out, const bf16* query, const Cache<bf16>& cache, const Step& step) {
    const int64_t group = step.num_heads / cache.num_kv_heads, num_heads = cache.num_kv_heads;
    std::vector<Unit> units;
    for (int64_t s = 0; s < step.num_sequences; s++) {
        const int64_t rows = step.query_lens[s] * group;
        const int64_t tiles = (rows + kTile - 1) / kTile;
        const int64_t together =
            step.num_sequences > 1 ? std::clamp<int64_t>(kUnitTiles / tiles, 1, num_heads) : 1;
        for (int64_t first = 0; first < rows; first += kUnitTiles * kTile)
            for (int64_t head = 0; head < num_heads; head += together)
                units.push_back({s, head, std::min(together, num_heads - head), first,
                                 std::min(kUnitTiles * kTile, rows - first)});
    }
#pragma omp parallel if (units.size() > 1)
    {
        static const TileConfig config;
        thread_local Scratch scratch;
        scratch.reserve(cache.head_dim);
        _tile_loadconfig(&config);
#pragma omp for schedule(dynamic)
        for (size_t i = 0; i < units.size(); i++)
            attend_unit(out, query, cache, step, units[i], scratch);
        _tile_release();
    }
}

// out [rows, num_outputs] = x [rows, num_inputs] * W^T * scales (+ bias), in bfloat16, W in int8 or
// bfloat16 (which has no scales). scales and bias may be null.
//
// weights [num_outputs / 16, num_inputs / 32, 16 pairs of inputs, 16 outputs, 2]: a tile of B each.
// Up to 32 rows at a time are multiplied with two strips of 16 outputs. int8 becomes bfloat16, where
// it is exact, in the cache: all of both strips, or, if there is only one block of rows, tile by tile.
// So every weight is read from memory once, at its own size.
inline void expand(uint32_t* to, const int8_t* weights, int64_t count) {
    for (int64_t i = 0; i < count; i += 32) {
        auto load = [&](int64_t at) {
            return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(
                _mm_loadu_si128(reinterpret_cast<const __m128i*>(weights + at))));
        };
        _mm512_store_si512(to + i / 2, std::bit_cast<__m512i>(
                                           _mm512_cvtne2ps_pbh(load(i + 16), load(i))));
    }
}

inline void store_outputs(bf16* out, const float* sums, const float* scales, const float* bias,
                          int64_t num_rows, int64_t num_outputs) {
    const __m512 scale = scales ? _mm512_loadu_ps(scales) : _mm512_set1_ps(1.0f);
    const __m512 shift = bias ? _mm512_loadu_ps(bias) : _mm512_setzero_ps();
    for (int64_t row = 0; row < num_rows; row++) {
        const __m512 sum = _mm512_fmadd_ps(_mm512_load_ps(sums + row * kTile), scale, shift);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + row * num_outputs),
                            std::bit_cast<__m256i>(_mm512_cvtneps_pbh(sum)));
    }
}

// The strips that a thread multiplies with, as bfloat16 tiles.
template <class W>
struct Strips;

template <>
struct Strips<bf16> {
    const bf16* at[2];
    Strips(char*, const bf16* weights, int64_t size, bool has_two, bool)
        : at{weights, weights + (has_two ? size : 0)} {}
    const void* tile(int i, int64_t k) const { return at[i] + k * 2 * kTile * kTile; }
};

template <>
struct Strips<int8_t> {
    static constexpr int64_t kWeights = 2 * kTile * kTile;  // of a tile
    const int8_t* at[2];
    uint32_t* expanded[2];
    bool is_one_block;

    Strips(char* memory, const int8_t* weights, int64_t size, bool has_two, bool is_one_block)
        : at{weights, weights + (has_two ? size : 0)},
          expanded{reinterpret_cast<uint32_t*>(memory),
                   reinterpret_cast<uint32_t*>(memory) + size / 2},
          is_one_block(is_one_block) {
        if (is_one_block) return;
        expand(expanded[0], at[0], size);
        expand(expanded[1], at[1], size);
    }
    const void* tile(int i, int64_t k) const {
        if (!is_one_block) return expanded[i] + k * kWeights / 2;
        uint32_t* const to = expanded[i] + k % 4 * kWeights / 2;
        expand(to, at[i] + k * kWeights, kWeights);
        return to;
    }
};

template <class W>
void linear(bf16* out, const bf16* x, const W* weights, const float* scales, const float* bias,
            int64_t rows, int64_t num_inputs, int64_t num_outputs) {
    const int64_t num_steps = num_inputs / 32, num_strips = num_outputs / kTile;
    const int64_t padded_rows = (rows + kTile - 1) / kTile * kTile, size = num_inputs * kTile;
    const bool is_one_block = padded_rows <= 2 * kTile;
    std::vector<bf16> padded;
    if (padded_rows != rows) {
        padded.resize(padded_rows * num_inputs);
        std::copy_n(x, rows * num_inputs, padded.data());
        x = padded.data();
    }
#pragma omp parallel
    {
        static const TileConfig config;
        thread_local std::vector<char> memory;
        memory.resize(4 * kTile * 64 + 2 * size * sizeof(bf16) + 64);
        char* at = memory.data() + (-reinterpret_cast<uintptr_t>(memory.data()) & 63);
        auto* sums = reinterpret_cast<float*>(at);
        _tile_loadconfig(&config);
#pragma omp for schedule(static)
        for (int64_t strip = 0; strip < num_strips; strip += 2) {
            const bool has_two = strip + 1 < num_strips;
            const Strips<W> strips(at + 4 * kTile * 64, weights + strip * size, size, has_two,
                                   is_one_block);
            for (int64_t row = 0; row < padded_rows; row += 2 * kTile) {
                const bool has_more = row + kTile < padded_rows;
                const bf16* upper = x + row * num_inputs;
                const bf16* lower = upper + (has_more ? kTile * num_inputs : 0);
                _tile_zero(0);
                _tile_zero(1);
                _tile_zero(2);
                _tile_zero(3);
                for (int64_t k = 0; k < num_steps; k++) {
                    _tile_loadd(4, upper + k * 32, num_inputs * 2);
                    _tile_loadd(6, strips.tile(0, k), 64);
                    _tile_dpbf16ps(0, 4, 6);
                    _tile_loadd(7, strips.tile(1, k), 64);
                    _tile_dpbf16ps(1, 4, 7);
                    if (has_more) {
                        _tile_loadd(5, lower + k * 32, num_inputs * 2);
                        _tile_dpbf16ps(2, 5, 6);
                        _tile_dpbf16ps(3, 5, 7);
                    }
                }
                _tile_stored(0, sums, 64);
                _tile_stored(1, sums + kTile * kTile, 64);
                _tile_stored(2, sums + 2 * kTile * kTile, 64);
                _tile_stored(3, sums + 3 * kTile * kTile, 64);
                for (int64_t i = 0; i < 2 * (1 + has_more); i++) {
                    const int64_t first = row + i / 2 * kTile, column = (strip + i % 2) * kTile;
                    if (i % 2 && !has_two) continue;
                    store_outputs(out + first * num_outputs + column, sums + i * kTile * kTile,
                                  scales ? scales + column : nullptr,
                                  bias ? bias + column : nullptr, std::min(kTile, rows - first),
                                  num_outputs);
                }
            }
        }
        _tile_release();
    }
}

}  // namespace amx

#endif  // __AMX_BF16__

}  // namespace

#define EXPORT(T, suffix)                                                                         \
    extern "C" void rms_norm_##suffix(T* out, const T* x, T* residual, const T* weight,           \
                                      int64_t rows, int64_t size, int64_t x_stride,               \
                                      int64_t out_stride, float eps) {                            \
        rms_norm<T>(out, x, residual, weight, rows, size, x_stride, out_stride, eps);             \
    }                                                                                             \
    extern "C" void rotate_##suffix(T* x, const T* cos, const T* sin, int64_t rows,               \
                                    int64_t num_heads, int64_t head_dim, int64_t row_stride) {    \
        rotate<T>(x, cos, sin, rows, num_heads, head_dim, row_stride);                            \
    }                                                                                             \
    extern "C" void silu_mul_##suffix(T* out, const T* gate_up, int64_t rows, int64_t size) {     \
        silu_mul<T>(out, gate_up, rows, size);                                                    \
    }                                                                                             \
    extern "C" void store_kv_##suffix(T* keys, T* values, const T* key, const T* value,           \
                                      const int64_t* slots, int64_t rows, int64_t size,           \
                                      int64_t row_stride) {                                       \
        store_kv<T>(keys, values, key, value, slots, rows, size, row_stride);                     \
    }                                                                                             \
    extern "C" void attention_##suffix(T* out, const T* query, const Cache<T>* cache,             \
                                       const Step* step) {                                        \
        attention<T>(out, query, *cache, *step);                                                  \
    }

EXPORT(float, f32)
EXPORT(bf16, bf16)

// bfloat16, head_dim a multiple of 32, block_size one of 16, no softcap.
#ifdef __AMX_BF16__
extern "C" bool enable_amx() { return amx::enable(); }
extern "C" void attention_amx(bf16* out, const bf16* query, const Cache<bf16>* cache,
                              const Step* step) {
    amx::attention(out, query, *cache, *step);
}
// num_inputs a multiple of 32, num_outputs one of 16.
extern "C" void linear_int8_amx(bf16* out, const bf16* x, const int8_t* weights,
                                const float* scales, const float* bias, int64_t rows,
                                int64_t num_inputs, int64_t num_outputs) {
    amx::linear(out, x, weights, scales, bias, rows, num_inputs, num_outputs);
}
extern "C" void linear_bf16_amx(bf16* out, const bf16* x, const bf16* weights,
                                const float* scales, const float* bias, int64_t rows,
                                int64_t num_inputs, int64_t num_outputs) {
    amx::linear(out, x, weights, scales, bias, rows, num_inputs, num_outputs);
}
#else
extern "C" bool enable_amx() { return false; }
#endif
