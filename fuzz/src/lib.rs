//! What all fuzzing targets share.

use std::sync::LazyLock;

use moeflux::tools::parsers::Parser;

/// Folder of the file that is parsed, in memory where the system has such a folder.
static FOLDER: LazyLock<tempfile::TempDir> = LazyLock::new(|| {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).expect("a temporary folder")
});

/// Reads `bytes` by the parser of this name. An error is a good answer, a panic is not.
pub fn read(name: &str, bytes: &[u8]) {
    let parser = Parser::ALL.into_iter().find(|parser| parser.name() == name).expect("a parser");
    let _ = parser.read(bytes, FOLDER.path());
}
