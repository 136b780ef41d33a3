//! Logits, hidden states and chosen experts against mlx-lm's, layer by layer: prefill at once, in chunks, and
//! decode step by step.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{Golden, Seen, difference, engine, exact, feed, goldens, sets};
use moeflux::MemoryRequest;

/// `max |a - b| <= BAR * rms(b)`.
const BAR: f64 = 1e-3;

fn matches(golden: &Golden, device: &str, chunk: Option<usize>) {
    let at = format!("{} on {device}, chunk {chunk:?}", golden.name);
    let engine = engine(&golden.folder, exact(device), MemoryRequest { chunk, ..MemoryRequest::default() });
    let mut session = engine.session().unwrap();
    let mut seen = Seen::default();
    let (prompt, generated) = (golden.prompt(), golden.generated());

    let logits = feed(&mut session, &prompt, Some(&mut seen));
    let wanted = golden.floats("prefill_logits_f32").unwrap();
    let d = difference(&logits, &wanted.numbers);
    assert!(d <= BAR, "{at}: prefill logits differ by {d:e} of the rms");
    for (layer, hidden) in seen.hidden.iter().enumerate() {
        let wanted = golden.floats(&format!("hidden_f32.{layer}")).unwrap();
        let d = difference(hidden, &wanted.numbers);
        assert!(d <= BAR, "{at}: hidden states of layer {layer} differ by {d:e} of the rms");
    }

    let wanted = golden.floats("decode_logits_f32").unwrap();
    for (i, token) in generated.iter().enumerate() {
        let logits = feed(&mut session, &[*token], Some(&mut seen));
        let d = difference(&logits, wanted.row(i));
        assert!(d <= BAR, "{at}: logits of decode step {i} differ by {d:e} of the rms");
    }
    let mut compared = 0;
    for layer in 0..seen.hidden.len() {
        let Some((k, wanted)) = golden.ints(&format!("experts_f32.{layer}")) else { continue };
        assert_eq!(sets(k, &seen.experts[layer]), sets(k, &wanted), "{at}: experts of layer {layer}");
        compared += 1;
    }
    assert!(compared > 0, "{at}: no layer's experts were compared");
}

#[test]
fn the_reference_device_matches_mlx() {
    for golden in goldens() {
        for chunk in [None, Some(3)] {
            matches(&golden, "reference", chunk);
        }
    }
}

#[test]
fn the_cpu_device_matches_mlx() {
    for golden in goldens() {
        for chunk in [None, Some(1), Some(3), Some(8)] {
            matches(&golden, "cpu", chunk);
        }
    }
}
