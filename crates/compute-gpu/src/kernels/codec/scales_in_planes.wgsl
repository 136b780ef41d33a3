// Scales and biases of four blocks in separate planes.
// implements: @scales
// needs: codec/block_scales, codec/load_blocks
// constants: BLOCK_COLS, ELEMENT

// Words of scales and biases, of which the bits from `shifts` on are used. Scales and biases of a
// block's second half are in `seconds` and `second_biases` where each takes a word.
struct FourScales {
    scales: vec4<u32>, seconds: vec4<u32>, biases: vec4<u32>, second_biases: vec4<u32>, shifts: vec4<u32>,
}

fn load_scales(rows: RowOffsets, block: vec4<u32>) -> FourScales {
    let scale_byte = block * 32u / BLOCK_COLS * SCALE_BYTES;
    var scales: vec4<u32>;
    var seconds: vec4<u32>;
    var biases: vec4<u32>;
    var second_biases: vec4<u32>;
    if (ELEMENT > 2u) { scales = load_words(rows.scales + scale_byte); }
    if (TWO_SCALES && SCALE_BYTES == 4u) { seconds = load_words(rows.scales + scale_byte + 4u); }
    if (HAS_BIAS) { biases = load_words(rows.biases + scale_byte); }
    if (TWO_BIASES && SCALE_BYTES == 4u) { second_biases = load_words(rows.biases + scale_byte + 4u); }
    return FourScales(scales, seconds, biases, second_biases, (rows.scales + scale_byte & vec4<u32>(3u)) * 8u);
}

// The words that contain four byte addresses.
fn load_words(bytes: vec4<u32>) -> vec4<u32> {
    let word = bytes >> vec4<u32>(2u);
    var last = 0u;
    if (!SKIP_FOURTH) { last = w[word.w]; }
    return vec4<u32>(w[word.x], w[word.y], w[word.z], last);
}

fn block_scales(blocks: FourBlocks) -> BlockScales {
    var all: BlockScales;
    all.first = vec4<f32>(1.0);
    if (ELEMENT < 3u) { return all; }
    let words = blocks.scales.scales >> blocks.scales.shifts;
    all.first = decode_scales(words);
    if (TWO_SCALES && SCALE_BYTES == 4u) { all.second = decode_scales(blocks.scales.seconds); }
    if (TWO_SCALES && SCALE_BYTES < 4u) { all.second = decode_scales(words >> vec4<u32>(SCALE_BYTES * 8u & 31u)); }
    let bias_words = blocks.scales.biases >> blocks.scales.shifts;
    if (HAS_BIAS) { all.bias = decode_scales(bias_words); }
    if (TWO_BIASES && SCALE_BYTES == 4u) { all.second_bias = decode_scales(blocks.scales.second_biases); }
    if (TWO_BIASES && SCALE_BYTES < 4u) {
        all.second_bias = decode_scales(bias_words >> vec4<u32>(SCALE_BYTES * 8u & 31u));
    }
    return all;
}

fn decode_scales(words: vec4<u32>) -> vec4<f32> {
    return vec4<f32>(decode_scale(words.x), decode_scale(words.y), decode_scale(words.z), decode_scale(words.w));
}
