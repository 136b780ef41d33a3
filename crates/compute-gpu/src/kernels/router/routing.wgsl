// Parameters of the router for one row: offsets of logits, selected ids, their weights, the shared
// expert's gate, corrections and scales of experts; scale of the weights.
struct Routing { logits: u32, ids: u32, weights: u32, gate: u32, correction: u32, expert_scale: u32, scale: f32 }
