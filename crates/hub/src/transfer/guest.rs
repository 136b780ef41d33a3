//! Files that another process downloads: looks at how far it has come, and what follows its end.

use std::{
    fs::File,
    sync::{Arc, atomic::Ordering},
};

use super::transfer::Transfer;
use crate::{
    blocks::BlockSet,
    error::HubError,
    guest_file::is_same,
    listing::Contents,
    partial_file::{PartialFile, bytes_path, recorded, write_at},
    schedule::OpenFile,
};

impl Transfer {
    /// Looks how far the owner of a file has come. If it has ended, the file is complete, or this
    /// process goes on with it.
    pub(super) fn look(&self, file: usize) -> Result<(), HubError> {
        let bytes = self.schedule().bytes(file).map(Arc::clone);
        let Some(bytes) = bytes else { return Ok(()) };
        let Contents { tag, size, .. } = &self.files[file].contents;
        let blob = self.repository.blob(tag);
        let lock = self.try_lock(file)?;
        if lock.is_some() && self.has_contents(file) {
            return match is_same(&bytes, &blob) {
                Some(true) => self.complete_guest(file),
                _ => self.leave(file),
            };
        }
        let record = recorded(&blob, *size);
        match (is_same(&bytes, &bytes_path(&blob)), lock) {
            (Some(true), Some(lock)) => self.take_over(file, lock),
            (Some(true), None) => self.end_look(file, record),
            // It is deleted, or has its name and not yet its links.
            (None, None) => self.end_look(file, None),
            _ => self.leave(file),
        }
    }

    /// Lets readers have the blocks of an owner's record, if there is one.
    fn end_look(&self, file: usize, record: Option<BlockSet>) -> Result<(), HubError> {
        let added = match self.schedule().guest(file) {
            Some(guest) => guest.end_look(record.as_ref()),
            None => return Ok(()),
        };
        let Some(added) = added else { return self.leave(file) };
        self.counters.present.fetch_add(added, Ordering::Relaxed);
        self.arrived.notify_all();
        Ok(())
    }

    /// Gives a file that its owner has completed its names. The caller has its lock.
    fn complete_guest(&self, file: usize) -> Result<(), HubError> {
        let guest = self.schedule().take_guest(file);
        let Some(guest) = guest else { return Ok(()) };
        self.arrived.notify_all();
        self.counters.present.fetch_add(guest.blocks().missing(), Ordering::Relaxed);
        if !guest.agrees() {
            return self.leave(file);
        }
        self.counters.checked.fetch_add(guest.blocks().size(), Ordering::Relaxed);
        self.link(file)
    }

    /// Goes on with a file whose owner has ended before it was complete.
    fn take_over(&self, file: usize, lock: File) -> Result<(), HubError> {
        let Contents { tag, size, .. } = &self.files[file].contents;
        let mut partial = PartialFile::open(&self.repository.blob(tag), *size)?;
        let mut copied = BlockSet::empty(*size);
        let whole = loop {
            let own = {
                let mut schedule = self.schedule();
                let Some(guest) = schedule.guest(file) else { return Ok(()) };
                if guest.own().blocks == copied {
                    let Some(added) = guest.end_look(Some(partial.blocks().present())) else {
                        drop(schedule);
                        return self.leave(file);
                    };
                    self.counters.present.fetch_add(added, Ordering::Relaxed);
                    let is_sequential = false;
                    let open = OpenFile { partial, _lock: lock, is_resumed: true, is_sequential };
                    schedule.take_over(file, open);
                    break schedule.take_whole(file);
                }
                guest.own().clone()
            };
            // Its digest then covers the bytes that readers have had.
            for block in own.blocks.without(&copied) {
                let range = partial.blocks().bytes_of(block);
                own.read(&range)
                    .and_then(|bytes| write_at(partial.bytes(), &bytes, range.start))
                    .map_err(HubError::file(partial.path(), "writing"))?;
                partial.add(&range);
            }
            copied = own.blocks;
        };
        self.arrived.notify_all();
        whole.map_or(Ok(()), |open| self.complete(file, open))
    }

    /// Gives up a file whose owner has deleted or replaced its bytes, as their digest was wrong, or
    /// has other bytes than this process has fetched.
    fn leave(&self, file: usize) -> Result<(), HubError> {
        let error = HubError::OtherBytes { file: self.files[file].name() };
        match self.fetch_again(file, &error) {
            true => Err(error),
            false => Ok(()),
        }
    }
}
