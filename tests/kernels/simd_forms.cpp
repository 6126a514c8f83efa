// Holds the products of one vector unit to plain arithmetic, without Python: test_simd_forms.py
// builds it for each unit. Prints the largest error of every format and a hash of the products' bits; exit
// code 1 where an error is too large or a row's bits are others beside other rows.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "gemm.h"
#include "half.h"

using namespace hunch;

namespace {

std::mt19937 generator(7);
double normal() { return std::normal_distribution<double>()(generator); }

// Random numbers and scales in place of a file's; limits are as likely as the rest.
void fill(Matrix& w) {
    const int levels = w.format == Format::INT8 ? 8 : w.format == Format::K6 ? 6 : 5;
    const bool is_unsigned = group_bytes(w.format) - head_bytes(w.format) == 16 * P;
    for (int8_t& level : w.levels) level = (int8_t)((int)(generator() % 255) - 127);
    for (int n = 0; n < w.num_out; n++) {
        for (int g = 0; g < w.num_groups; g++) {
            int8_t q[GROUP];
            for (int8_t& x : q) {
                int raw = (int)(generator() & 0xFF);
                x = is_2bit(w.format) ? (int8_t)(raw & 3)
                    : is_unsigned     ? (int8_t)(raw & 15)
                                      : (int8_t)((int8_t)raw >> (8 - levels));
            }
            w.put_levels(n, g, q);
            if (!has_supers(w.format)) w.put_scale(n, g, (float)normal(), (float)normal());
        }
        for (int i = 0; has_supers(w.format) && i < w.num_groups / super_groups(w.format); i++) {
            uint16_t d = to_half((float)normal()), m = to_half((float)normal());
            if (super_bytes(w.format) <= 4 * P) {
                uint8_t power = (uint8_t)(120 + generator() % 16);
                if (w.format == Format::FP4) w.put_apart(n, i, &power, 1);
                else w.put_apart(n, i, (uint8_t*)&d, 2);
                if (w.format == Format::INT5M) w.put_apart(n, i, (uint8_t*)&m, 2, 2 * P);
                continue;
            }
            uint8_t scales[2 * SUPER], minima[SUPER];
            const bool is_byte = has_halves(w.format) || w.format == Format::K2;
            for (uint8_t& x : scales) x = (uint8_t)(generator() & (is_byte ? 255 : 63));
            for (uint8_t& x : minima) x = (uint8_t)(generator() & 63);
            w.put_super(n, i, (uint8_t*)&d, has_halves(w.format) ? nullptr : (uint8_t*)&m, scales,
                        is_byte ? nullptr : minima);
        }
    }
}

// A row of the input as the product sees it: rounded to whole numbers times a scale per group.
std::vector<double> rounded_row(const Input& input, int row) {
    std::vector<double> x(input.num_groups() * GROUP);
    for (int g = 0; g < input.num_groups(); g++) {
        const uint8_t* at = input.tiles + row / RT * input.tile_bytes() + g * tile_group_bytes(input.is_fine);
        const float* scales = (const float*)(at + activation_bytes(input.is_fine));
        const double scale = scales[row % RT * SCALE_COPIES];
        for (int j = 0; j < GROUP; j++) {
            const int8_t* q = (const int8_t*)at + tile_byte(row % RT, j);
            x[g * GROUP + j] = scale * (input.is_fine ? 64 * q[0] + q[RT * GROUP] : q[0]);
        }
    }
    return x;
}

uint64_t hash = 0;

void add_to_hash(const float* x, int count) {
    for (int i = 0; i < count; i++) {
        uint32_t bits;
        std::memcpy(&bits, x + i, 4);
        hash = (hash ^ bits) * 0x100000001B3;
    }
}

// Infinite where a row alone has other bits.
double largest_error(Format format, int num_rows, bool is_fine) {
    const int num_out = 3 * P + 1, num_in = 512;
    Matrix w(format, num_out, num_in);
    fill(w);
    Input input;
    input.num_in = num_in;
    input.is_fine = is_fine;
    Input alone = input;
    std::vector<uint8_t> tiles(input.bytes_for(num_rows)), panel(Scratch::panel_bytes(num_in));
    std::vector<uint8_t> one(num_rows * input.bytes_for(1), 0x55);
    std::vector<float> sums(num_rows * 2 * input.num_groups()), own = sums;
    input.tiles = tiles.data();
    input.sums = sums.data();
    for (int row = 0; row < num_rows; row++) {
        std::vector<float> x(num_in);
        for (float& value : x) value = row % 3 ? (float)normal() : row % 2 ? 1.0f : -1.0f;
        input.put_row(row, x.data());
        alone.tiles = one.data() + row * input.bytes_for(1);
        alone.sums = own.data() + row * 2 * input.num_groups();
        alone.put_row(0, x.data());
    }
    const int stride = 4 * P;
    std::vector<float> out((size_t)num_rows * stride), weight(num_in), single(stride);
    multiply(w, 0, num_out, input, 0, num_rows, out.data(), stride, Scratch{panel.data()});
    double worst = 0;
    for (int row = 0; row < num_rows; row++) {
        alone.tiles = one.data() + row * input.bytes_for(1);
        alone.sums = own.data() + row * 2 * input.num_groups();
        multiply(w, 0, num_out, alone, 0, 1, single.data(), stride, Scratch{panel.data()});
        const float* mine = &out[(size_t)row * stride];
        if (std::memcmp(mine, single.data(), num_out * sizeof(float))) return INFINITY;
        add_to_hash(mine, num_out);
        std::vector<double> x = rounded_row(input, row);
        for (int n = 0; n < num_out; n++) {
            w.read_row(n, weight.data());
            double sum = 0, size = 1e-30;
            for (int k = 0; k < num_in; k++) {
                sum += x[k] * weight[k];
                size += std::fabs(x[k] * weight[k]);
            }
            worst = std::fmax(worst, std::fabs(mine[n] - sum) / size);
        }
    }
    return worst;
}

}  // namespace

int main() {
    const char* names[] = {"INT4", "INT8", "FLOAT", "INT5", "K4", "K5", "K6", "TABLE", "INT5M", "NL", "FP4", "K2", "T2"};
    bool is_good = true;
    std::printf("%d channels, %d rows\n", P, RT);
    for (Format format : {Format::INT4, Format::INT8, Format::INT5, Format::K4, Format::K5, Format::K6,
                          Format::TABLE, Format::INT5M, Format::NL, Format::FP4, Format::K2, Format::T2})
        for (bool is_fine : {false, true}) {
            double worst = 0;
            hash = 0xCBF29CE484222325;
            for (int num_rows : {1, 2, 3, 4, 5, 6, 7, 8, 9, 21, 40})
                worst = std::fmax(worst, largest_error(format, num_rows, is_fine));
            std::printf("%s %s %.1e %016llx\n", names[(int)format], is_fine ? "14 bits" : "8 bits", worst,
                        (unsigned long long)hash);
            is_good = is_good && worst < 1e-6;
        }
    return is_good ? 0 : 1;
}
