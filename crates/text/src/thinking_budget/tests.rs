//! Tests of budgets: where thoughts end, and where nothing is forced.

use super::*;

const OPEN: u32 = 1;
const VOCAB: usize = 8;

/// Tokens of an answer whose model wants `wanted`, as far as the mask lets it.
fn answer(budget: &ThinkingBudget, wanted: &[u32]) -> Vec<u32> {
    let mut mask = budget.start().unwrap();
    let mut answer = Vec::new();
    for wanted in wanted {
        let mut logits = [0.0; VOCAB];
        logits[*wanted as usize] = 1.0;
        mask.mask(&mut logits).unwrap();
        let largest = (0..VOCAB).max_by(|a, b| logits[*a].total_cmp(&logits[*b])).unwrap();
        mask.accept(largest as u32).unwrap();
        answer.push(largest as u32);
    }
    answer
}

fn budget(tokens: usize, close: &[u32], is_open: bool) -> ThinkingBudget {
    ThinkingBudget { tokens, open: Some(OPEN), close: close.into(), is_open }
}

#[test]
fn thoughts_end_after_their_budget() {
    let close = [2];
    // Open by the prompt; opened by the answer; without any room.
    assert_eq!(answer(&budget(3, &close, true), &[5, 6, 7, 5, 6]), [5, 6, 7, 2, 6]);
    assert_eq!(answer(&budget(1, &close, false), &[1, 5, 6, 7]), [1, 5, 2, 7]);
    assert_eq!(answer(&budget(0, &close, true), &[5, 6, 7]), [2, 6, 7]);
}

#[test]
fn shorter_thoughts_and_text_stay() {
    let close = [2];
    assert_eq!(answer(&budget(3, &close, true), &[5, 2, 6, 7, 5, 6]), [5, 2, 6, 7, 5, 6]);
    assert_eq!(answer(&budget(0, &close, false), &[5, 6, 7]), [5, 6, 7]);
}

#[test]
fn a_mark_of_several_tokens_is_written_as_a_whole() {
    let close = [2, 3, 4];
    assert_eq!(answer(&budget(2, &close, true), &[5, 6, 7, 7, 7, 5]), [5, 6, 2, 3, 4, 5]);
    // The model has begun it.
    assert_eq!(answer(&budget(2, &close, true), &[5, 2, 7, 7, 5]), [5, 2, 3, 4, 5]);
}

#[test]
fn a_forbidden_mark_ends_thoughts_nevertheless() {
    let mut mask = budget(0, &[2], true).start().unwrap();
    let mut logits = [0.0; VOCAB];
    logits[2] = f32::NEG_INFINITY;
    mask.mask(&mut logits).unwrap();
    assert!(logits[2].is_finite() && logits[5] == f32::NEG_INFINITY);
}
