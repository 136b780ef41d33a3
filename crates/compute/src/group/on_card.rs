//! Names the card in an error.

use std::io;

use moeflux_ops::Error;

/// Adds the number of the card to an error. Errors of a request keep their fields.
pub(super) fn on_card(card: usize) -> impl Fn(Error) -> Error {
    move |error| match error {
        Error::Device(message) => Error::Device(format!("card {card}: {message}")),
        Error::Shape(message) => Error::Shape(format!("card {card}: {message}")),
        Error::Memory { bytes, source } => Error::Memory {
            bytes,
            source: io::Error::new(source.kind(), format!("card {card}: {source}")),
        },
        other => other,
    }
}
