//! Images as a model's processor sees them.

use safetensors::{Dtype, SafeTensors};

use super::*;

/// Folder of a model with Qwen3-VL's processor and no weights.
fn model() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    write("config.json", r#"{"model_type": "qwen3_vl_moe"}"#);
    let size = r#"{"shortest_edge": 4096, "longest_edge": 1048576}"#;
    write("preprocessor_config.json", &format!(r#"{{"size": {size}, "patch_size": 16}}"#));
    folder
}

fn image(name: &str) -> String {
    let images = Path::new(env!("CARGO_MANIFEST_DIR")).join("../vision/tests/data/images");
    images.join(name).to_str().unwrap().to_owned()
}

#[test]
fn an_image_is_shown_as_a_processor_sees_it() {
    let model = model();
    let (folder, out) = (model.path().to_str().unwrap(), model.path().join("o.safetensors"));
    let args = ["vision", "--processor-only", "--model", folder, "--out", out.to_str().unwrap()];
    let page = image("page.png");
    let said = succeed(&[&args[..], &["--image", &page]].concat());
    // 640 x 360, in blocks of 2 x 2 patches of 16 pixels.
    assert_eq!(said, "640 x 360 pixels, scaled to 640 x 352; 40 x 22 patches, 220 tokens\n");
    let bytes = std::fs::read(&out).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensor = |name: &str| file.tensor(name).unwrap();
    let [rgb, grid, pixels] = ["decoded_rgb", "grid_thw", "pixel_values"].map(tensor);
    assert_eq!((rgb.dtype(), rgb.shape()), (Dtype::U8, &[360, 640, 3][..]));
    assert_eq!((pixels.dtype(), pixels.shape()), (Dtype::F32, &[880, 1536][..]));
    let sides = grid.data().chunks(4).map(|side| i32::from_le_bytes(side.try_into().unwrap()));
    assert_eq!(sides.collect::<Vec<_>>(), [1, 22, 40]);
    let fewer = succeed(&[&args[..], &["--image", &page, "--image-max-tokens", "60"]].concat());
    let tokens = fewer.split(" patches, ").nth(1).unwrap().split(' ').next().unwrap();
    assert!((40..=60).contains(&tokens.parse::<u32>().unwrap()), "{fewer}");
}

#[test]
fn a_tower_writes_its_rows() {
    let case = Path::new(env!("CARGO_MANIFEST_DIR")).join("../moeflux/tests/data/vision");
    let model = case.join("qwen3_vl_moe");
    let out = tempfile::tempdir().unwrap();
    let out = out.path().join("o.safetensors");
    let (page, model) = (image("gradient.png"), model.to_str().unwrap());
    let args = ["vision", "--model", model, "--image", &page, "--out", out.to_str().unwrap()];
    assert!(succeed(&[&args[..], &["--threads", "2"]].concat()).ends_with("12 tokens\n"));
    let bytes = std::fs::read(&out).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut names = file.names();
    names.sort();
    let expected =
        ["decoded_rgb", "deepstack.0", "deepstack.1", "embeds", "grid_thw", "pixel_values"];
    assert_eq!(names, expected);
    assert_eq!(file.tensor("embeds").unwrap().shape(), [12, 64]);
    // A model of text alone.
    let none = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tales/model");
    let said = run(&["vision", "--model", none.to_str().unwrap(), "--image", &page]);
    assert_error(&said, 1, &["the model has no vision tower"]);
    let said = run(&["vision", "--model", model, "--image", &page, "--device", "abacus"]);
    assert_error(&said, 1, &["abacus"]);
}

#[test]
fn files_that_are_no_images_are_one_error() {
    let model = model();
    let folder = model.path().to_str().unwrap();
    let path = |name: &str, bytes: &[u8]| {
        let path = model.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let page = std::fs::read(image("page.png")).unwrap();
    for (file, problem) in [
        (path("text.png", b"no image"), "expected a PNG, JPEG"),
        (path("empty.png", b""), "0 bytes"),
        (path("cut.png", &page[..page.len() / 2]), "damaged or cut"),
        (image("missing.png"), "cannot read the image"),
    ] {
        let args = ["vision", "--processor-only", "--model", folder, "--image", &file];
        assert_error(&run(&args), 1, &[&file, problem]);
    }
    let args = ["vision", "--processor-only", "--image", &image("one.png")];
    assert_error(&run(&args), 2, &["--model"]);
    path("config.json", br#"{"model_type": "unknown"}"#);
    let said = run(&[&args[..], &["--model", folder]].concat());
    assert_error(&said, 1, &["config.json", "model_type", "Qwen3-VL"]);
}
