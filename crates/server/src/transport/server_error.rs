//! Failures of a server.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
};

use moeflux::Error;

use super::allowed::AllowedOrigin;

/// Failure of a server.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServerError {
    /// Address that other machines reach, without keys.
    #[error(
        "{address} can be reached from other machines, and there is no key: give \
         --api-key-file FILE, or --no-key to let everybody in"
    )]
    OpenWithoutKey {
        /// The address.
        address: IpAddr,
    },
    /// Origin that pages of anybody have, without keys.
    #[error(
        "--allow-origin {origin} lets pages of anybody send requests, and there is no key: give \
         --api-key-file FILE"
    )]
    OriginWithoutKey {
        /// The origin.
        origin: AllowedOrigin,
    },
    /// Address that cannot be listened at.
    #[error("cannot listen at {address}: {source}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// Error of the operating system.
        source: io::Error,
    },
    /// Folder of turns that cannot be used.
    #[error("{}: the folder of answers cannot be opened: {source}", path.display())]
    TurnFolder {
        /// The folder.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// Failure to start the threads that wait for clients.
    #[error("cannot start the server's threads: {0}")]
    Runtime(io::Error),
    /// Failure of the engine.
    #[error(transparent)]
    Engine(#[from] Error),
}
