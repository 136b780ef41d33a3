// Dot products of rows of weights with staged activations: the loop over a row's blocks.
// needs: codec/load_blocks, @activations
// constants: ROWS, ROW_THREADS

// Contributions of this thread's blocks to the dot products of its rows. The first blocks are
// loaded; the next ones are loaded before the current ones are used. `x_row`: the row of x.
fn row_products(first: FourBlocks, rows: RowOffsets, first_block: u32, x_row: u32) -> vec4<f32> {
    // Without next blocks, a loop would hold registers for them.
    if (ALL_VALID) { return fold_rows(four_products(first, vec4<u32>(first_block) + BLOCK_OF + x_row * ROW_BLOCKS)); }
    if (ONE_LOAD) { return fold_rows(masked_products(first, first_block, x_row)); }
    var sums = vec4<f32>();
    var current = first;
    for (var c = first_block; c < ROW_BLOCKS; c += ROW_THREADS * BLOCKS_PER_ROW) {
        var next = current;
        if (c + ROW_THREADS * BLOCKS_PER_ROW < ROW_BLOCKS) { next = load_blocks(rows, c + ROW_THREADS * BLOCKS_PER_ROW); }
        sums += masked_products(current, c, x_row);
        current = next;
    }
    return fold_rows(sums);
}

// Contributions of four blocks from block `c` on; zero past the end of a row.
fn masked_products(blocks: FourBlocks, c: u32, x_row: u32) -> vec4<f32> {
    let block = vec4<u32>(c) + BLOCK_OF;
    let contributions = four_products(blocks, min(block, vec4<u32>(ROW_BLOCKS - 1u)) + x_row * ROW_BLOCKS);
    return select(vec4<f32>(), contributions, block < vec4<u32>(ROW_BLOCKS));
}

fn fold_rows(sums: vec4<f32>) -> vec4<f32> {
    if (ROWS == 2u) { return vec4<f32>(sums.x + sums.y, sums.z + sums.w, 0.0, 0.0); }
    if (ROWS == 1u) { return vec4<f32>((sums.x + sums.y) + (sums.z + sums.w), 0.0, 0.0, 0.0); }
    return sums;
}
