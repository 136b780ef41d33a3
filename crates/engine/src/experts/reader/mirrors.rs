//! Folders with the same files as the model or some of them, on other disks.

use std::path::{Path, PathBuf};

use crate::{Error, checkpoint::Source};

/// So much of the start of a file is compared, and as much as the header of tensors takes: names, types and places.
const START: usize = 64 << 10;

/// The files of each folder: those that `own` names, as far as they are there. A file of `own` is not opened once more where it is
/// at home.
///
/// # Errors
/// A folder has none, or one that is of another length or begins with other bytes.
pub(super) fn open(own: &[Source], folders: &[PathBuf]) -> Result<Vec<Vec<Option<Source>>>, Error> {
    folders.iter().map(|folder| own.iter().map(|file| mirror(file, folder)).collect()).collect()
}

/// Which folder a file of the model is in: 0 is none of `folders`, and so the model's own.
pub(super) fn home(own: &Source, folders: &[PathBuf]) -> usize {
    folders.iter().position(|folder| own.path().parent() == Some(folder)).map_or(0, |i| i + 1)
}

fn mirror(own: &Source, folder: &Path) -> Result<Option<Source>, Error> {
    let Some(name) = own.path().file_name().filter(|_| own.file().is_some()) else {
        return Err(Error::Input("the model in the program has no mirrors: give --model".into()));
    };
    let path = folder.join(name);
    if path == own.path() || !path.try_exists().map_err(Error::file(&path, "cannot look for the file"))? {
        return Ok(None);
    }
    let copy = Source::open(&path)?;
    let differs = |what: &str| Error::Checkpoint {
        path: copy.path().into(),
        problem: format!(
            "{what} than {}: files of one name are the same in a mirror; copy it again",
            own.path().display()
        ),
    };
    if copy.len() != own.len() {
        return Err(differs(&format!("{} bytes instead of {}, another length", copy.len(), own.len())));
    }
    let mut at = 0;
    let mut end = START as u64;
    while at < end.min(own.len()) {
        let bytes = (end.min(own.len()) - at).min(START as u64) as usize;
        let [mut a, mut b] = [vec![0; bytes], vec![0; bytes]];
        for (source, buf) in [(own, &mut a), (&copy, &mut b)] {
            source.read_exact_at(buf, at).map_err(Error::file(source.path(), "cannot read the file"))?;
        }
        if a != b {
            return Err(differs("it holds other tensors or in other places"));
        }
        // A file of tensors begins with the length of its header.
        if at == 0
            && let Some(length) = a.first_chunk().filter(|_| name.to_string_lossy().ends_with(".safetensors"))
        {
            end = end.max(u64::from_le_bytes(*length).saturating_add(8));
        }
        at += bytes as u64;
    }
    Ok(Some(copy))
}
