#include "matrix.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>

#include "half.h"

namespace hunch {

namespace {

constexpr size_t HUGE_PAGE = 2 << 20;  // streaming through small pages costs a tenth to a quarter of the speed
constexpr size_t READ_BEYOND = 4096;   // bytes after the last group that kernels may read ahead
constexpr size_t SHARED = 128 << 20;   // bytes that matrices share, of which only those in use are memory

size_t whole_pages(size_t num_bytes) {
    static const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    return (num_bytes + page - 1) / page * page;
}

float half_at(const uint8_t* at, int lane) {
    uint16_t half;
    std::memcpy(&half, at + 2 * lane, 2);
    return from_half(half);
}

void set_half(uint8_t* at, int lane, float x) {
    uint16_t half = to_half(x);
    std::memcpy(at + 2 * lane, &half, 2);
}

// Where input i of a channel's group stands among vectors of 4 P numbers.
constexpr int byte_of(int lane, int i) {
    return IN_PAIRS ? (i / 8 * 2 + lane / 2) * 4 * P + lane % 2 * 8 + i % 8 : (i / 4 * P + lane) * 4 + i % 4;
}

constexpr int8_t NL_LEVELS[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t T2_LEVELS[16] = {-1, 0, 1, 2}, K2_LEVELS[16] = {0, 1, 2, 3};
constexpr int8_t FP4_LEVELS[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

void set_bits(uint8_t& byte, int mask, int bits) { byte = (uint8_t)((byte & ~mask) | (bits & mask)); }

}  // namespace

// A layer's matrices are smaller than huge pages, so they lie one after the other in a large mapping.
struct Pages {
    explicit Pages(size_t size) : size(size), mapped(size + READ_BEYOND + HUGE_PAGE) {
        int flags = MAP_PRIVATE | MAP_ANONYMOUS;
#ifdef MAP_NORESERVE
        flags |= MAP_NORESERVE;
#endif
        memory = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, flags, -1, 0);
        if (memory == MAP_FAILED) throw std::bad_alloc();
        start = (uint8_t*)(((size_t)memory + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
#ifdef MADV_HUGEPAGE
        madvise(start, size, MADV_HUGEPAGE);
#endif
    }
    ~Pages() { munmap(memory, mapped); }
    Pages(const Pages&) = delete;
    Pages& operator=(const Pages&) = delete;

    // So many bytes of zeros, and whose they are.
    static uint8_t* take(size_t num_bytes, std::shared_ptr<Pages>& pages) {
        static std::mutex mutex;
        static std::weak_ptr<Pages> newest;  // it ends with the last matrix in it
        const size_t rounded = whole_pages(num_bytes);
        std::lock_guard<std::mutex> lock(mutex);
        pages = newest.lock();
        if (!pages || pages->used + rounded > pages->size) {
            pages = std::make_shared<Pages>(rounded > SHARED ? rounded : SHARED);
            newest = pages;
        }
        uint8_t* found = pages->start + pages->used;
        pages->used += rounded;
        return found;
    }

    const size_t size, mapped;
    void* memory;
    uint8_t* start;
    size_t used = 0;
};

Matrix::Matrix(Format format, int num_out, int num_in)
    : format(format),
      num_out(num_out),
      num_in(num_in),
      num_panels((num_out + P - 1) / P),
      num_groups((num_in + GROUP - 1) / GROUP) {
    const int supers = super_groups(format);
    num_groups = (num_groups + supers - 1) / supers * supers;
    if (format == Format::NL) std::memcpy(levels, NL_LEVELS, sizeof levels);
    if (format == Format::FP4) std::memcpy(levels, FP4_LEVELS, sizeof levels);
    if (format == Format::K2) std::memcpy(levels, K2_LEVELS, sizeof levels);
    if (format == Format::T2) std::memcpy(levels, T2_LEVELS, sizeof levels);
    data = Pages::take(num_bytes(), pages_);
}

Matrix::~Matrix() {
#ifdef MADV_DONTNEED
    madvise(data, whole_pages(num_bytes()), MADV_DONTNEED);  // other matrices may stay
#endif
}

void Matrix::put_levels(int channel, int g, const int8_t* q) {
    uint8_t* at = group(channel, g) + head_bytes(format);
    const int lane = channel % P;
    if (format == Format::INT8) {
        for (int i = 0; i < GROUP; i += 4) std::memcpy(at + byte_of(lane, i), q + i, 4);
        return;
    }
    if (format == Format::K6) {
        for (int half = 0; half < 2; half++, q += 16, at += 12 * P)
            for (int i = 0; i < 16; i++) {
                const int byte = byte_of(lane, i);
                if (byte < 12 * P) set_bits(at[byte], 0xFC, q[i] * 4);
                for (int k = 0; byte >= 12 * P && k < 3; k++)
                    set_bits(at[byte - 4 * P * (3 - k)], 3, q[i] >> (4 - 2 * k));
            }
        return;
    }
    for (int i = 0; is_2bit(format) && i < 16; i++) {
        const int byte = byte_of(lane, i), shift = byte / (8 * P) * 4;
        set_bits(at[byte % (8 * P)], 15 << shift, (q[i] | q[i + 16] << 2) << shift);
    }
    if (is_2bit(format)) return;
    for (int i = 0; i < 16; i++)
        at[byte_of(lane, i)] = (uint8_t)((q[i] & 15) | (q[i + 16] & 15) << 4);
    if (group_bytes(format) - head_bytes(format) == 16 * P) return;
    for (int i = 0; i < GROUP; i++) {
        const int byte = byte_of(lane, i), vector = byte / (4 * P);
        set_bits(at[16 * P + byte % (4 * P)], 1 << vector, (q[i] < 0) << vector);
    }
}

void Matrix::get_levels(int channel, int g, int8_t* q) const {
    const uint8_t* at = group(channel, g) + head_bytes(format);
    const int lane = channel % P;
    if (format == Format::INT8) {
        for (int i = 0; i < GROUP; i += 4) std::memcpy(q + i, at + byte_of(lane, i), 4);
        return;
    }
    if (format == Format::K6) {
        for (int half = 0; half < 2; half++, q += 16, at += 12 * P)
            for (int i = 0; i < 16; i++) {
                const int byte = byte_of(lane, i);
                int last = 0;
                for (int k = 0; byte >= 12 * P && k < 3; k++)
                    last = last << 2 | (at[byte - 4 * P * (3 - k)] & 3);
                q[i] = (int8_t)(byte < 12 * P ? (int8_t)at[byte] >> 2 : (last ^ 32) - 32);
            }
        return;
    }
    for (int i = 0; is_2bit(format) && i < 16; i++) {
        const int byte = byte_of(lane, i), bits = at[byte % (8 * P)] >> byte / (8 * P) * 4;
        q[i] = bits & 3;
        q[i + 16] = bits >> 2 & 3;
    }
    if (is_2bit(format)) return;
    for (int i = 0; i < 16; i++) {
        uint8_t byte = at[byte_of(lane, i)];
        q[i] = byte & 15;
        q[i + 16] = byte >> 4;
    }
    if (group_bytes(format) - head_bytes(format) == 16 * P) return;
    for (int i = 0; i < GROUP; i++) {
        const int byte = byte_of(lane, i);
        if (at[16 * P + byte % (4 * P)] >> byte / (4 * P) & 1) q[i] = (int8_t)(q[i] - 16);
    }
}

void Matrix::put_scale(int channel, int g, float d, float m) {
    set_half(group(channel, g), channel % P, d);
    if (format == Format::INT4) set_half(group(channel, g) + 2 * P, channel % P, m);
}

void Matrix::put_super(int channel, int s, const uint8_t* d, const uint8_t* m, const uint8_t* scales,
                       const uint8_t* minima) {
    uint8_t* at = super(channel, s);
    const int lane = channel % P;
    std::memcpy(at + 2 * lane, d, 2);
    at += 2 * P;
    if (m) {
        std::memcpy(at + 2 * lane, m, 2);
        at += 2 * P;
    }
    for (int i = 0; i < 2 * SUPER; i++)
        at[i * P + lane] = !minima ? scales[i] : i % 2 ? minima[i / 2] : scales[i / 2];
}

void Matrix::put_apart(int channel, int g, const uint8_t* scale, int size, int at) {
    std::memcpy(super(channel, g) + at + channel % P * size, scale, size);
}

void Matrix::fill_floats(const float* rows, int first, int count) {
    for (int n = 0; n < count; n++, rows += num_in)
        for (int g = 0; g < num_groups; g++) {
            float x[GROUP] = {};
            int size = num_in - g * GROUP < GROUP ? num_in - g * GROUP : GROUP;
            std::memcpy(x, rows + g * GROUP, size * sizeof(float));
            if (format == Format::FLOAT) {
                float* at = reinterpret_cast<float*>(group(first + n, g)) + (first + n) % P;
                for (int j = 0; j < GROUP; j++) at[j * P] = x[j];
                continue;
            }
            float low = x[0], high = x[0], top = 0;
            for (float value : x) {
                low = value < low ? value : low;
                high = value > high ? value : high;
                top = std::fabs(value) > top ? std::fabs(value) : top;
            }
            const bool is_int8 = format == Format::INT8;
            float d = from_half(to_half(is_int8 ? top / 127 : (high - low) / 15));
            float m = is_int8 ? 0.0f : from_half(to_half(low)), inverse = d > 0 ? 1 / d : 0;
            float bottom = is_int8 ? -127.0f : 0.0f, limit = is_int8 ? 127.0f : 15.0f;
            int8_t q[GROUP];
            for (int j = 0; j < GROUP; j++)
                q[j] = (int8_t)std::fmin(std::fmax(std::nearbyint((x[j] - m) * inverse), bottom), limit);
            put_scale(first + n, g, d, m);
            put_levels(first + n, g, q);
        }
}

// The scales and minima of a group's halves.
void Matrix::scales_of(int channel, int g, float* d, float* m) const {
    const int lane = channel % P;
    const uint8_t* at = has_supers(format) ? super(channel, g / super_groups(format)) : group(channel, g);
    d[0] = d[1] = format == Format::FP4 ? from_power(at[lane]) : half_at(at, lane);
    m[0] = m[1] = format == Format::INT4 || format == Format::INT5M ? half_at(at + 2 * P, lane) : 0;
    if (super_groups(format) == 1 || format == Format::T2) return;
    const uint8_t* mine = at + super_bytes(format) - (SUPER - g % SUPER) * 2 * P + lane;
    for (int half = 0; half < 2; half++) {
        const uint8_t count = mine[half * P];
        if (has_halves(format)) d[half] *= unit * (int8_t)count;
        else if (format == Format::K2) d[half] *= count & 15;
        else d[half] *= mine[0];
        if (!has_halves(format))
            m[half] = -(half_at(at + 2 * P, lane) * (format == Format::K2 ? count >> 4 : mine[P]));
    }
}

void Matrix::read_row(int channel, float* out) const {
    const int lane = channel % P;
    for (int g = 0; g * GROUP < num_in; g++, out += GROUP) {
        const uint8_t* at = group(channel, g);
        int size = num_in - g * GROUP < GROUP ? num_in - g * GROUP : GROUP;
        if (format == Format::FLOAT) {
            for (int j = 0; j < size; j++) out[j] = reinterpret_cast<const float*>(at)[j * P + lane];
            continue;
        }
        float d[2], m[2];  // of each half
        int8_t q[GROUP];
        get_levels(channel, g, q);
        scales_of(channel, g, d, m);
        if (has_levels(format))
            for (int8_t& x : q) x = levels[x];
        const int shift = is_shifted(format) ? 16 : 0;
        for (int j = 0; j < size; j++) out[j] = d[j / 16] * (float)(q[j] + shift) + m[j / 16];
    }
}

}  // namespace hunch
