//! Pages of the documentation: their code is compiled and run as documentation tests.

#[doc = include_str!("../../../docs/api.md")]
struct Api;
#[doc = include_str!("../../../docs/guide/library.md")]
struct Library;
