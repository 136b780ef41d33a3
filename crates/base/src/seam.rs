//! Names for the crates above, which are no part of the public interface.

pub use crate::atomic_file::{
    BLOCK_BYTES, FolderLimits, create, files_with_extension, read_text, remove_stale, shrink_folder,
};
pub use crate::faulty_disk::{SystemDisk, WriteTarget, gb, sync_folder, write_all_at};
pub use crate::guard::guarded;
pub use crate::system::{
    IO_STACK, OpenFiles, free_space, has_graphics, is_system_entry, page_align, physical_cores,
};
pub use crate::text_files::MAX_TOKENIZER;

/// JSON as Python writes it.
pub mod json {
    pub use crate::json::{parse, problem};
}
