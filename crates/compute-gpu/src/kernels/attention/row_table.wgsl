// Rows of any sequences: the table of their KV caches, in `words` from offset `table` on, which the
// kernel binds. A row has the start of its cache in the arena, in vectors of 16 bytes, its
// position, the capacity of the cache and the offset of the values in the cache, in elements; then
// the offsets of K, V, and cosines and sines of a row that is not in the cache yet.

const ROW_WORDS = 7u;

fn row_word(table: u32, row: u32, i: u32) -> u32 { return words[table + row * ROW_WORDS + i]; }

fn row_kv_start(table: u32, row: u32) -> u32 { return row_word(table, row, 0u); }

fn row_position(table: u32, row: u32) -> u32 { return row_word(table, row, 1u); }

fn row_capacity(table: u32, row: u32) -> u32 { return row_word(table, row, 2u); }

fn row_v_offset(table: u32, row: u32) -> u32 { return row_word(table, row, 3u); }
