//! Tests of sizes against those of transformers 5.24.0, of limits, and of refusals.

use super::*;

const QWEN: SizeRule = SizeRule {
    patch: 16,
    merge: 2,
    frames: 2,
    resizes: true,
    fit: Fit::Pixels { min: 65_536, max: 16_777_216, frames: 1, widens: false },
};
const GLM: SizeRule = SizeRule {
    patch: 14,
    merge: 2,
    frames: 2,
    resizes: true,
    fit: Fit::Pixels { min: 12_544, max: 9_633_792, frames: 2, widens: true },
};
const GEMMA: SizeRule =
    SizeRule { patch: 16, merge: 3, frames: 1, resizes: true, fit: Fit::Tokens { most: 280 } };
const KIMI: SizeRule = SizeRule {
    patch: 14,
    merge: 2,
    frames: 1,
    resizes: true,
    fit: Fit::Patches { most: 16_384, side: 512 },
};
const ALL: [&SizeRule; 4] = [&QWEN, &GLM, &GEMMA, &KIMI];

fn size(width: u32, height: u32) -> ImageSize {
    ImageSize { width, height }
}

#[test]
fn sizes_are_those_of_transformers() {
    // Width and height, then those after scaling by Qwen, GLM-4V, Gemma 4 and Kimi.
    let cases = [
        [[1, 1], [256, 256], [84, 84], [768, 768], [1, 1]],
        [[80, 112], [224, 320], [84, 112], [672, 912], [80, 112]],
        [[5, 900], [32, 3_456], [28, 5_040], [48, 10_752], [5, 900]],
        [[900, 5], [3_456, 32], [5_040, 28], [10_752, 48], [900, 5]],
        [[400, 2], [3_648, 32], [5_600, 28], [11_328, 48], [400, 2]],
        [[256, 256], [256, 256], [252, 252], [768, 768], [256, 256]],
        [[1_024, 768], [1_024, 768], [1_036, 756], [912, 672], [1_024, 768]],
        [[3_000, 2_000], [3_008, 1_984], [2_688, 1_792], [960, 624], [2_202, 1_468]],
        [[5_000, 5_000], [4_096, 4_096], [2_184, 2_184], [768, 768], [1_792, 1_792]],
        [[8_192, 6_000], [4_768, 3_488], [2_548, 1_876], [912, 672], [2_095, 1_534]],
        [[30_000, 200], [30_016, 192], [26_880, 168], [9_792, 48], [7_168, 47]],
        [[20, 31], [224, 320], [84, 112], [624, 960], [20, 31]],
        [[27, 28], [256, 288], [84, 84], [768, 816], [27, 28]],
        [[641, 479], [640, 480], [644, 476], [912, 672], [641, 479]],
    ];
    for [from, expected @ ..] in cases {
        for (rule, [width, height]) in ALL.into_iter().zip(expected) {
            let layout = rule.layout(size(from[0], from[1]), None).unwrap();
            assert_eq!(layout.resized, size(width, height), "{from:?}, {rule:?}");
            let unit = rule.token_side() as u32;
            let [columns, rows] = [width, height].map(|side| side.div_ceil(unit));
            let merge = rule.merge as u32;
            assert_eq!(layout.grid, [1, rows * merge, columns * merge]);
            assert_eq!(layout.tokens, rows * columns);
        }
    }
}

#[test]
fn a_limit_of_tokens_holds_and_lowers_the_maximum() {
    let sides = [1, 2, 9, 31, 64, 333, 1_000, 4_001];
    for rule in ALL {
        for (width, height) in sides.iter().flat_map(|w| sides.map(|h| (*w, h))) {
            let free = rule.layout(size(width, height), None);
            for most in [1, 2, 7, 64, 256, 1_024, 1 << 20, u32::MAX] {
                match (rule.layout(size(width, height), Some(most)), &free) {
                    (Ok(layout), Ok(free)) => {
                        assert!(layout.tokens <= most, "{width} x {height} at {most}: {layout:?}");
                        assert!(free.tokens > most || layout == *free, "{width} x {height}");
                    }
                    (Ok(layout), Err(error)) => unreachable!("{layout:?} without a limit: {error}"),
                    (Err(error), _) => {
                        let ratio = f64::from(width.max(height)) / f64::from(width.min(height));
                        assert!(ratio > 200.0 || f64::from(most) < ratio, "{most}: {error}");
                    }
                }
            }
        }
    }
    // The maximum of Qwen's rule, lowered once: 1,024 tokens of 32 x 32 pixels.
    let lowered = QWEN.layout(size(4_000, 3_000), Some(1_024)).unwrap();
    assert_eq!(lowered.resized, size(1_152, 864));
    assert!(QWEN.layout(size(64, 64), Some(0)).is_err());
}

#[test]
fn refusals_say_what_is_expected_and_what_helps() {
    let error = |rule: &SizeRule, width, height, most: Option<u32>| {
        rule.layout(size(width, height), most).unwrap_err().to_string()
    };
    assert_eq!(
        error(&QWEN, 201, 1, None),
        "expected sides in a ratio of at most 200, got an image of 201 x 1: crop the long side"
    );
    QWEN.layout(size(200, 1), None).unwrap();
    GLM.layout(size(1, 200), None).unwrap();
    assert!(error(&GLM, 1, 201, None).contains("ratio of at most 200"));
    assert!(error(&GEMMA, 0, 5, None).contains("a pixel at least, got an image of 0 x 5"));
    assert!(error(&QWEN, 6_400, 64, Some(2)).contains("at most 2 tokens"));
    let fixed = |rule: &SizeRule| SizeRule { resizes: false, ..rule.clone() };
    assert!(error(&fixed(&QWEN), 64, 65, None).contains("sides that are multiples of 32"));
    assert!(error(&fixed(&QWEN), 64, 64, Some(3)).contains("at most 3 tokens"));
    assert!(error(&fixed(&GEMMA), 480, 48 * 29, None).contains("at most 280 tokens"));
    assert!(error(&fixed(&KIMI), 0, 9, None).contains("0 x 9"));
    let vast = SizeRule { patch: 256, merge: 16, ..GEMMA };
    assert!(error(&vast, 50, 50, None).contains("at most 33554432 pixels after scaling"));
    let vast = Fit::Pixels { min: 1, max: 1 << 40, frames: 1, widens: false };
    let vast = SizeRule { fit: vast, ..QWEN };
    assert!(error(&vast, u32::MAX, u32::MAX, None).contains("after scaling"));
    // Frames count: two of 4,096 x 4,096 are the most.
    vast.layout(size(4_096, 4_096), None).unwrap();
    let error_of_frames = error(&vast, 4_096, 4_128, None);
    assert!(error_of_frames.contains("at most 16777216 pixels after scaling"), "{error_of_frames}");
    // The width of one token is 48 pixels, which all rows of the image have for a while.
    GEMMA.layout(size(1, 1_000_000), None).unwrap();
    let error_between = error(&GEMMA, 1, 2_000_000, None);
    assert!(error_between.contains("at most 67108864 pixels while"), "{error_between}");
}

#[test]
fn images_stay_as_they_are_where_the_processor_does_not_scale() {
    let fixed = |rule: &SizeRule, width, height| {
        let rule = SizeRule { resizes: false, ..rule.clone() };
        let layout = rule.layout(size(width, height), None).unwrap();
        assert_eq!(layout.resized, size(width, height));
        layout.grid
    };
    assert_eq!(fixed(&QWEN, 32, 64), [1, 4, 2]);
    assert_eq!(fixed(&GEMMA, 48, 96), [1, 6, 3]);
    assert_eq!(fixed(&KIMI, 15, 57), [1, 6, 2]);
}
