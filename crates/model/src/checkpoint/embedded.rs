//! Models whose files are in the binary.

use std::{
    collections::HashMap,
    fs::File,
    io::{self, Read, Write},
    path::Path,
};

use moeflux_base::{AtomicFile, Error, Readers, seam::remove_stale};

use super::{
    data_file::DataFile,
    folder::Checkpoint,
    limits::{TEXT_FILES, TOKENIZER},
};

/// Bytes that are compared or written at a time.
const BLOCK: usize = 256 << 10;

/// Name and contents of a file in the binary.
type EmbeddedFile = (&'static str, &'static [u8]);

/// Unpacks a model's files to `folder`. Later calls compare the files and rewrite only damaged
/// ones. Keeps few pages of the binary resident.
///
/// # Errors
/// The folder cannot be written.
pub fn unpack_embedded(files: &[EmbeddedFile], folder: &Path) -> Result<(), Error> {
    std::fs::create_dir_all(folder)
        .map_err(Error::file(folder, "cannot make the folder of the built-in model"))?;
    // Of runs that were killed while they unpacked.
    remove_stale(folder, |target| files.iter().any(|(name, _)| name.as_bytes() == target));
    for (name, bytes) in files {
        let path = folder.join(name);
        if holds(&path, bytes).unwrap_or(false) {
            continue;
        }
        let write = || {
            let out = AtomicFile::create(&path, Readers::Umask)?;
            for block in bytes.chunks(BLOCK) {
                out.file().write_all(block)?;
                release_pages(block);
            }
            out.finish()
        };
        write().map_err(Error::file(&path, "cannot unpack the built-in model"))?;
    }
    Ok(())
}

/// Whether a file has exactly these contents.
fn holds(path: &Path, bytes: &'static [u8]) -> io::Result<bool> {
    let mut file = File::open(path)?;
    if file.metadata()?.len() != bytes.len() as u64 {
        return Ok(false);
    }
    let mut read = vec![0; BLOCK];
    for block in bytes.chunks(BLOCK) {
        let read = &mut read[..block.len()];
        file.read_exact(read)?;
        let equal = read == block;
        release_pages(block);
        if !equal {
            return Ok(false);
        }
    }
    Ok(true)
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

impl Checkpoint {
    /// Opens a model whose files, name and contents each, are in the binary, where its weights are
    /// read directly.
    ///
    /// # Errors
    /// The files are damaged, or some are missing.
    pub fn embedded(files: &[EmbeddedFile]) -> Result<Self, Error> {
        let named = |name: &str| files.iter().find(|file| file.0 == name);
        let text_files: HashMap<_, _> = TEXT_FILES
            .into_iter()
            .filter(|name| *name != TOKENIZER)
            .filter_map(|name| Some((name, named(name)?.1.to_vec())))
            .collect();
        let shards = files.iter().filter(|(name, _)| name.ends_with(".safetensors"));
        let shards = shards.map(|(name, bytes)| DataFile::embedded(name, bytes)).collect();
        let tokenizer = named(TOKENIZER).map(|(name, bytes)| DataFile::embedded(name, bytes));
        let checkpoint = Self::assemble(Path::new("(in the binary)"), shards, text_files)?;
        Ok(Self { tokenizer, ..checkpoint })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_damaged_copy_is_replaced() {
        let (files, cache) = (&moeflux_tales::FILES, tempfile::tempdir().unwrap());
        let folder = cache.path().join(moeflux_tales::FOLDER);
        unpack_embedded(files, &folder).unwrap();
        for name in ["config.json", "model.safetensors"] {
            let path = folder.join(name);
            let good = std::fs::read(&path).unwrap();
            let mut bad = good.clone();
            bad[good.len() - 1] ^= 1;
            for damaged in [&bad[..], &good[..good.len() - 1]] {
                std::fs::write(&path, damaged).unwrap();
                unpack_embedded(files, &folder).unwrap();
                assert_eq!(std::fs::read(&path).unwrap(), good);
            }
        }
        // Left by a run that was killed.
        std::fs::write(folder.join(".model.safetensors.0123456789abcdef.partial"), "half").unwrap();
        unpack_embedded(files, &folder).unwrap();
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), files.len());
    }
}
