//! The package, as it is published.

use std::process::Command;

use sha2::{Digest, Sha256};

/// Registries refuse packages of 10 MiB; the rest is left for a larger tokenizer.
const MOST_BYTES: u64 = 9_500_000;

#[test]
fn the_package_fits_into_a_registry() {
    let target = std::env::temp_dir().join(format!("moeflux-tales-{}", std::process::id()));
    let output = Command::new(env!("CARGO"))
        .args(["package", "--offline", "--no-verify", "--allow-dirty", "--quiet"])
        .arg("--target-dir")
        .arg(&target)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    let package = format!("package/moeflux-tales-{}.crate", env!("CARGO_PKG_VERSION"));
    let bytes = std::fs::metadata(target.join(package)).map(|file| file.len());
    let _ = std::fs::remove_dir_all(&target);
    let bytes = bytes.unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&output.stderr)));
    assert!(bytes < MOST_BYTES, "{bytes} bytes");
}

#[test]
fn the_folder_is_named_by_the_weights() {
    let weights = moeflux_tales::FILES.iter().find(|(name, _)| *name == "model.safetensors");
    let digest = Sha256::digest(weights.unwrap().1);
    let start: String = digest[..8].iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(moeflux_tales::FOLDER, format!("tales-18m-{start}"));
}
