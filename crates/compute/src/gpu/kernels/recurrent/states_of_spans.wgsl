// Recurrent states of `rows` sequences with any numbers of rows, in one arena. The parameter `table`
// is the offset in `words` of the starts of their committed and next states, of their first rows and
// of their numbers of rows.
// implements: @states

@group(0) @binding(1) var<storage, read_write> arena: array<f32>;
@group(0) @binding(2) var<storage, read> words: array<u32>;

fn sequence_count() -> u32 { return p.rows; }

fn first_row_of(sequence: u32) -> u32 { return words[p.table + 4u * sequence + 2u]; }

fn rows_of(sequence: u32) -> u32 { return words[p.table + 4u * sequence + 3u]; }

fn load_state(sequence: u32, i: u32) -> f32 { return arena[words[p.table + 4u * sequence] + i]; }

fn store_state(sequence: u32, i: u32, x: f32) { arena[words[p.table + 4u * sequence + 1u] + i] = x; }
