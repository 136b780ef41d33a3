//! Folders with the same files as the model, on other disks.

use std::path::{Path, PathBuf};

use crate::{Error, checkpoint::Source};

/// So much of the start of a file is compared, and as much as the header of tensors takes: names, types and places.
const START: usize = 64 << 10;

/// Opens the files of each folder that `own` has.
///
/// # Errors
/// One is missing, of another length, or begins with other bytes.
pub(super) fn open(own: &[Source], folders: &[PathBuf]) -> Result<Vec<Vec<Source>>, Error> {
    folders.iter().map(|folder| own.iter().map(|file| mirror(file, folder)).collect()).collect()
}

fn mirror(own: &Source, folder: &Path) -> Result<Source, Error> {
    let Some(name) = own.path().file_name().filter(|_| own.file().is_some()) else {
        return Err(Error::Input("the model in the program has no mirrors: give --model".into()));
    };
    let copy = Source::open(&folder.join(name))?;
    let differs = |what: &str| Error::Checkpoint {
        path: copy.path().into(),
        problem: format!("{what} than {}: a mirror has the same files; copy it again", own.path().display()),
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
    Ok(copy)
}
