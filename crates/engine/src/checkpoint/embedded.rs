//! Built-in model: tales-18m, embedded in the binary.

use std::{
    collections::HashMap,
    io::{self, Read, Write},
    path::{Path, PathBuf},
};

use sha2::{Digest, Sha256};

use super::{Checkpoint, DataFile};
use crate::base::error::Error;

/// A file of the built-in model. The digest is a constant, so that verifying an unpacked copy does
/// not touch the pages of the binary.
struct EmbeddedFile {
    name: &'static str,
    bytes: &'static [u8],
    sha256: &'static str,
}

macro_rules! file {
    ($name:literal, $sha256:literal) => {
        EmbeddedFile {
            name: $name,
            bytes: include_bytes!(concat!("../../../../models/tales-18m/", $name)),
            sha256: $sha256,
        }
    };
}

// A static, as a constant would be copied at each use: 10 MB.
static FILES: [EmbeddedFile; 6] = [
    file!("config.json", "6c991c8eb3afbfe9721549fa6dbfab81397207979b0b2b8e9b1f202bda0d016b"),
    file!(
        "generation_config.json",
        "303cdcadc13ae86c307e937880d99984684c2c7b06c06b509e7c8c966a485fb0"
    ),
    file!("tokenizer.json", "2f3a4f75cac873109d8296f38f3944b960d0aaab5237b5ebad058f33112e1a11"),
    file!(
        "tokenizer_config.json",
        "50f5b49bba5dc7bb7098ad72ee83a7a8837467a6e05c23e0a5638c976b8c2d5f"
    ),
    file!(
        "chat_template.jinja",
        "9f0e276ab90bb7e2e874715ac082205729cf14b6b15e1e4cda8ecf5f0e002872"
    ),
    file!("model.safetensors", "1e4014eb5f179e501d4dfd96bbee3064ab5d936005885ad6e73e233f62e315c2"),
];

/// Folder name of the unpacked model, before its digest.
const NAME: &str = "tales-18m";

/// Unpacks the built-in model below `cache` and returns its folder. Later calls verify the digests
/// of the files and rewrite only damaged ones.
///
/// # Errors
/// The folder cannot be written.
pub fn unpack_embedded(cache: &Path) -> Result<PathBuf, Error> {
    let [.., weights] = &FILES;
    let folder = cache.join(format!("{NAME}-{}", &weights.sha256[..16]));
    std::fs::create_dir_all(&folder)
        .map_err(Error::file(&folder, "cannot make the folder of the built-in model"))?;
    for file in &FILES {
        let path = folder.join(file.name);
        if sha256(&path).is_ok_and(|d| d == file.sha256) {
            continue;
        }
        // Written to a temporary file and renamed: concurrent processes never see a partial file.
        let temporary = folder.join(format!(".{}.{}", file.name, std::process::id()));
        let write = || {
            let mut out = std::fs::File::create(&temporary)?;
            out.write_all(file.bytes)?;
            out.sync_all()?;
            release_pages(file.bytes);
            std::fs::rename(&temporary, &path)
        };
        write().map_err(|e| {
            let _ = std::fs::remove_file(&temporary);
            Error::file(&path, "cannot unpack the built-in model")(e)
        })?;
    }
    Ok(folder)
}

/// Drops the pages of the binary that hold `bytes` from the resident set of this process.
#[cfg(target_os = "linux")]
fn release_pages(bytes: &'static [u8]) {
    use rustix::mm::{Advice, madvise};

    let page = rustix::param::page_size();
    let start = bytes.as_ptr().align_offset(page);
    let Some(len) = bytes.len().checked_sub(start).map(|len| len - len % page) else { return };
    // SAFETY: the range is within `bytes` and consists of whole pages of a private, never written
    // mapping of the executable file. Dropped pages are read from the file again, unchanged, on the
    // next access.
    let _ =
        unsafe { madvise(bytes.as_ptr().add(start).cast_mut().cast(), len, Advice::LinuxDontNeed) };
}

#[cfg(not(target_os = "linux"))]
fn release_pages(_: &'static [u8]) {}

/// SHA-256 of a file, in hexadecimal.
fn sha256(path: &Path) -> io::Result<String> {
    let mut file = std::fs::File::open(path)?;
    let (mut hash, mut block) = (Sha256::new(), vec![0; 64 << 10]);
    loop {
        match file.read(&mut block)? {
            0 => break,
            n => hash.update(&block[..n]),
        }
    }
    Ok(hash.finalize().iter().map(|b| format!("{b:02x}")).collect())
}

impl Checkpoint {
    /// Opens the built-in model, which is read directly from the binary.
    ///
    /// # Errors
    /// The binary is damaged.
    pub fn embedded() -> Result<Self, Error> {
        let find = |name: &str| FILES.iter().find(|f| f.name == name).map(|f| f.bytes);
        let text_files: HashMap<_, _> = super::TEXT_FILES
            .into_iter()
            .filter_map(|name| Some((name, find(name)?.to_vec())))
            .collect();
        let weights = find("model.safetensors").unwrap_or_default();
        let files = vec![DataFile::embedded("model.safetensors", weights)];
        Self::assemble(Path::new("(in the binary)"), files, text_files)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_digest_constants_match_the_files() {
        for file in &FILES {
            let digest: String =
                Sha256::digest(file.bytes).iter().map(|b| format!("{b:02x}")).collect();
            assert_eq!(digest, file.sha256, "{}", file.name);
        }
    }

    #[test]
    fn a_damaged_copy_is_replaced() {
        let cache = tempfile::tempdir().unwrap();
        let folder = unpack_embedded(cache.path()).unwrap();
        let path = folder.join("config.json");
        let good = std::fs::read(&path).unwrap();
        std::fs::write(&path, b"{}").unwrap();
        assert_eq!(unpack_embedded(cache.path()).unwrap(), folder);
        assert_eq!(std::fs::read(&path).unwrap(), good);
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), FILES.len());
    }
}
