//! Images that requests name by their addresses: fetched before the prompt is made, in no turn.

use std::{fmt, sync::Arc};

use axum::body::Bytes;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    task::JoinSet,
};

use super::{
    images::{ImageAddress, ImageDigest, ImageTable, MAX_BYTES},
    models::ServedModel,
};
use crate::transport::{
    body::{BodyReader, JsonBody},
    error::ApiError,
    work::{FETCHES, run_beside},
};

/// Images of a request that are fetched at once.
const FETCHES_OF_REQUEST: usize = 4;

/// Bytes of the memory plan for images that are being fetched, beside
/// [`reserved_bytes`](crate::reserved_bytes), if there is an [`ImageFetcher`].
pub const IMAGE_FETCH_BYTES: u64 = (FETCHES * MAX_BYTES) as u64;

/// Function that fetches a file.
type Fetch = dyn Fn(&str, usize) -> Result<Vec<u8>, String> + Send + Sync;

/// Fetches images that requests name by https addresses. The default refuses all of them.
#[derive(Clone, Default)]
pub struct ImageFetcher(Option<Arc<Fetch>>);

impl ImageFetcher {
    /// Calls `fetch` with an address and the maximum number of bytes, on a thread that may wait for
    /// some seconds. Clients see its error, which should have neither the address nor words of the
    /// host. All checks of addresses are its own.
    pub fn new(
        fetch: impl Fn(&str, usize) -> Result<Vec<u8>, String> + Send + Sync + 'static,
    ) -> Self {
        Self(Some(Arc::new(fetch)))
    }
}

impl fmt::Debug for ImageFetcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ImageFetcher({})", if self.0.is_some() { "on" } else { "off" })
    }
}

/// Fetches of a server, a few at once.
pub(crate) struct ImageFetches {
    fetcher: ImageFetcher,
    turns: Arc<Semaphore>,
}

impl ImageFetches {
    pub(crate) fn new(fetcher: ImageFetcher) -> Self {
        Self { fetcher, turns: Arc::new(Semaphore::new(FETCHES)) }
    }

    /// Fetches the files of the images of a request that have addresses. They take room with its
    /// body.
    ///
    /// # Errors
    /// The server fetches none, or the model reads none; one cannot be fetched; they take more room
    /// than there is.
    pub(crate) async fn fetch(
        &self,
        images: &mut ImageTable,
        model: &ServedModel,
        body: &mut JsonBody,
        bodies: &BodyReader,
    ) -> Result<(), ApiError> {
        let Some(fetch) = &self.fetcher.0 else { return images.refuse_addresses() };
        if !model.has_vision() {
            return images.refuse(&model.name).map(drop);
        }
        let mut running = JoinSet::new();
        loop {
            while running.len() < FETCHES_OF_REQUEST
                && let Some((digest, address)) = images.take_address()
            {
                let (fetch, turns) = (Arc::clone(fetch), Arc::clone(&self.turns));
                let bodies = bodies.clone();
                running.spawn(async move {
                    let turn = turns.acquire_owned().await;
                    let url = address.url.clone();
                    // A fetch whose client is gone keeps its turn to its end.
                    let fetched = run_beside(move || Ok((fetch(&url, MAX_BYTES), turn)));
                    let (file, _turn) = fetched.await?;
                    let file = file.map_err(|problem| address.error(&problem))?;
                    let room = bodies.try_acquire(file.len())?;
                    Ok::<_, ApiError>(FetchedImage { digest, address, file: file.into(), room })
                });
            }
            let Some(fetched) = running.join_next().await else { return Ok(()) };
            let lost = |_| ApiError::internal("an image could not be fetched");
            let FetchedImage { digest, address, file, room } = fetched.map_err(lost)??;
            let limit = bodies.max_bytes();
            if body.add_room(room) > limit {
                let problem = format!("the images of the request have more than {limit} bytes");
                return Err(address.error(&problem));
            }
            images.add_fetched(digest, address, file)?;
        }
    }
}

/// An image with its file, and the room that it takes.
struct FetchedImage {
    digest: ImageDigest,
    address: ImageAddress,
    file: Bytes,
    room: OwnedSemaphorePermit,
}
