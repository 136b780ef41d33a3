//! Images of a request: from the fields of all APIs to what a model reads.
//!
//! A reader of messages puts the file of an image into the table of its request, and its place into
//! the message. When the model is known, the table is resolved: each file is read as the model sees
//! it, which gives the number of its tokens.

use std::collections::BTreeMap;

use axum::body::Bytes;
use moeflux::{
    Error,
    text::{MessageImage, PlacedImage},
    vision::ImageDetail,
};
use sha2::{Digest, Sha256};

use crate::transport::{
    base64,
    error::ApiError,
    json::{Fields, Json, wrong_type},
    work::is_cancelled,
};

/// Maximum size of an image's file in bytes.
pub(crate) const MAX_BYTES: usize = 20 << 20;

/// Maximum number of images of a request.
const MAX_IMAGES: usize = 32;

/// The field `detail` of an image.
fn detail(fields: &Fields<'_>) -> Result<ImageDetail, ApiError> {
    match fields.text("detail")?.as_deref() {
        None | Some("auto") => Ok(ImageDetail::Auto),
        Some("high" | "original") => Ok(ImageDetail::High),
        Some("low") => Ok(ImageDetail::Low),
        Some(_) => Err(wrong_type(&fields.path("detail"), "low, high, auto or original")),
    }
}

/// SHA-256 of an image.
pub(crate) type ImageDigest = [u8; 32];

/// An image as it was sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SentImage {
    /// Its file, whose bytes tell the format.
    pub(crate) file: Bytes,
    pub(crate) detail: ImageDetail,
    /// First place in the request.
    path: String,
}

impl SentImage {
    /// SHA-256 of the file, in this detail.
    pub(crate) fn digest(&self) -> ImageDigest {
        digest(&[&self.file], self.detail)
    }
}

/// An image as a model reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ReadImage {
    /// Tokens that stand for it in a prompt.
    pub(crate) tokens: usize,
    /// SHA-256 of its pixels as the model sees them.
    pub(crate) digest: ImageDigest,
    /// Remark for the client.
    pub(crate) note: Option<String>,
}

/// An image whose file is yet to be fetched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ImageAddress {
    pub(crate) url: String,
    detail: ImageDetail,
    /// First place in the request.
    path: String,
}

impl ImageAddress {
    /// Error of its fetch.
    pub(crate) fn error(&self, problem: &str) -> ApiError {
        image_error(&self.path, &format!("the image cannot be fetched: {problem}"))
    }
}

/// Image of a prompt, with its file.
#[derive(Clone, Debug)]
pub(crate) struct PromptFile {
    pub(crate) placed: PlacedImage,
    pub(crate) image: SentImage,
}

/// Images of a request as a model reads them.
#[derive(Clone, Debug, Default)]
pub(crate) struct ResolvedImages {
    /// Files by the digest of the pixels.
    pub(crate) files: BTreeMap<ImageDigest, SentImage>,
    /// Remarks for the client.
    pub(crate) notes: Vec<String>,
}

/// Files of the images of a request, each once. Until they are resolved, images of messages have no
/// tokens, and the digests by which their files are found here.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ImageTable {
    files: BTreeMap<ImageDigest, SentImage>,
    /// Images without a file yet, by the digests of their URLs.
    addresses: BTreeMap<ImageDigest, ImageAddress>,
    /// Images so far; one that is repeated counts each time.
    count: usize,
}

impl ResolvedImages {
    /// Images of a prompt.
    pub(crate) fn files(&self, placed: &[PlacedImage]) -> Vec<PromptFile> {
        let file = |placed: &PlacedImage| {
            let image = self.files.get(&placed.digest)?.clone();
            Some(PromptFile { placed: *placed, image })
        };
        placed.iter().filter_map(file).collect()
    }
}

impl ImageTable {
    /// The table of an earlier request, whose conversation the field `path` continues.
    pub(crate) fn continued(mut self, path: &str) -> Self {
        self.files.values_mut().for_each(|image| path.clone_into(&mut image.path));
        self
    }

    /// Whether there are files.
    pub(crate) fn has_files(&self) -> bool {
        !self.files.is_empty()
    }

    /// Whether files are yet to be fetched.
    pub(crate) fn has_addresses(&self) -> bool {
        !self.addresses.is_empty()
    }

    /// Takes an image whose file is yet to be fetched. It is put back with
    /// [`add_fetched`](Self::add_fetched).
    pub(crate) fn take_address(&mut self) -> Option<(ImageDigest, ImageAddress)> {
        self.addresses.pop_first()
    }

    /// Adds the file of an image that had an address.
    ///
    /// # Errors
    /// It is empty or over the limit.
    pub(crate) fn add_fetched(
        &mut self,
        digest: ImageDigest,
        address: ImageAddress,
        file: Bytes,
    ) -> Result<(), ApiError> {
        let ImageAddress { detail, path, .. } = address;
        check_len(file.len(), &path)?;
        self.files.insert(digest, SentImage { file, detail, path });
        Ok(())
    }

    /// Refuses images that have addresses, which this server does not fetch.
    ///
    /// # Errors
    /// There are some.
    pub(crate) fn refuse_addresses(&self) -> Result<(), ApiError> {
        self.refuse_addresses_as(&unread("https"))
    }

    fn refuse_addresses_as(&self, problem: &str) -> Result<(), ApiError> {
        let first = self.addresses.values().next();
        first.map_or(Ok(()), |address| Err(image_error(&address.path, problem)))
    }

    /// Detail in which an image with a file was first sent.
    pub(crate) fn detail(&self, digest: &ImageDigest) -> Option<ImageDetail> {
        self.files.get(digest).map(|image| image.detail)
    }

    /// Bytes of the files.
    pub(crate) fn bytes(&self) -> usize {
        self.files.values().map(|image| image.file.len()).sum()
    }

    /// Adds the image of a part of OpenAI's APIs: `image_url`, an object with `url` and `detail`,
    /// or a string beside `detail`.
    ///
    /// # Errors
    /// A field has a wrong type, is no URL of base64, or is over a limit.
    pub(crate) fn add_part(&mut self, part: &Fields<'_>) -> Result<ImageDigest, ApiError> {
        const NAME: &str = "image_url";
        if part.get("file_id").is_some() {
            let path = part.path("file_id");
            let problem = "files are not stored: send the image as data:image/png;base64,...";
            return Err(image_error(&path, problem));
        }
        let value = part.get(NAME).ok_or_else(|| part.missing(NAME))?;
        if !value.is_object() {
            return self.add_url(value, &part.path(NAME), detail(part)?);
        }
        let image = Fields::at(value, &part.path(NAME))?;
        let url = image.get("url").ok_or_else(|| image.missing("url"))?;
        self.add_url(url, &image.path("url"), detail(&image)?)
    }

    /// Adds the image of a block of Anthropic's API: `source`, of base64 or with a URL.
    ///
    /// # Errors
    /// As [`add_part`](Self::add_part).
    pub(crate) fn add_block(&mut self, block: &Fields<'_>) -> Result<ImageDigest, ApiError> {
        let source = block.object("source")?.ok_or_else(|| block.missing("source"))?;
        let value = |name: &str| source.get(name).ok_or_else(|| source.missing(name));
        let path = source.path("type");
        match &*source.text("type")?.ok_or_else(|| source.missing("type"))? {
            "base64" => self.add_base64(value("data")?, &source.path("data")),
            "url" => self.add_url(value("url")?, &source.path("url"), ImageDetail::Auto),
            other => {
                let message = format!("{path} is {other:?}: it must be base64 or url");
                Err(ApiError::invalid(path, message))
            }
        }
    }

    /// Adds an image of base64, which is at `path` in the request.
    ///
    /// # Errors
    /// It is no string of base64, or over a limit.
    pub(crate) fn add_base64(
        &mut self,
        value: Json<'_>,
        path: &str,
    ) -> Result<ImageDigest, ApiError> {
        let text = value.as_str().ok_or_else(|| wrong_type(path, "a string of base64"))?;
        self.add(&text, path, ImageDetail::Auto)
    }

    fn add_url(
        &mut self,
        value: Json<'_>,
        path: &str,
        detail: ImageDetail,
    ) -> Result<ImageDigest, ApiError> {
        let url = value.as_str().ok_or_else(|| wrong_type(path, "a string"))?;
        if scheme(&url).eq_ignore_ascii_case("https") {
            return self.add_address(&url, path, detail);
        }
        let base64 = base64_of(&url);
        let base64 = base64.map_err(|problem| image_error(path, &problem))?;
        self.add(base64, path, detail)
    }

    fn add_address(
        &mut self,
        url: &str,
        path: &str,
        detail: ImageDetail,
    ) -> Result<ImageDigest, ApiError> {
        self.add_one(path)?;
        // No file of an image begins so.
        let digest = digest(&[b"url:", url.as_bytes()], detail);
        if !self.files.contains_key(&digest) {
            let address = || ImageAddress { url: url.to_owned(), detail, path: path.to_owned() };
            self.addresses.entry(digest).or_insert_with(address);
        }
        Ok(digest)
    }

    fn add(
        &mut self,
        base64: &str,
        path: &str,
        detail: ImageDetail,
    ) -> Result<ImageDigest, ApiError> {
        self.add_one(path)?;
        check_len(base64::decoded_len(base64), path)?;
        let file = base64::decode(base64).map_err(|problem| image_error(path, &problem))?;
        let digest = digest(&[&file], detail);
        let sent = || SentImage { file: file.into(), detail, path: path.to_owned() };
        self.files.entry(digest).or_insert_with(sent);
        Ok(digest)
    }

    /// Counts a further image.
    ///
    /// # Errors
    /// There are too many.
    fn add_one(&mut self, path: &str) -> Result<(), ApiError> {
        self.count += 1;
        if self.count > MAX_IMAGES {
            let problem = format!("expected at most {MAX_IMAGES} images in a request, got more");
            return Err(image_error(path, &problem));
        }
        Ok(())
    }

    /// Gives images their tokens and digests, as `read` reads their files, one after another.
    ///
    /// # Errors
    /// The errors of `read`, at the place in the request; a file was not fetched; the client is
    /// gone.
    pub(crate) fn resolve<'a>(
        self,
        images: impl Iterator<Item = &'a mut MessageImage>,
        mut read: impl FnMut(&SentImage) -> Result<ReadImage, Error>,
    ) -> Result<ResolvedImages, ApiError> {
        self.refuse_addresses_as(
            "images are not fetched here: send them as data:image/png;base64,...",
        )?;
        let (mut found, mut resolved) = (BTreeMap::new(), ResolvedImages::default());
        for (digest, image) in self.files {
            if is_cancelled() {
                return Err(Error::Cancelled.into());
            }
            let read = read(&image).map_err(|error| match error {
                Error::Image(problem) => image_error(&image.path, &problem.to_string()),
                other => other.into(),
            });
            let read = read?;
            resolved.files.insert(read.digest, image);
            resolved.notes.extend(read.note.clone());
            found.insert(digest, read);
        }
        for image in images {
            let read = found.get(&image.digest);
            let read = read.ok_or_else(|| ApiError::internal("an image of the request is lost"))?;
            (image.tokens, image.digest) = (read.tokens, read.digest);
        }
        Ok(resolved)
    }

    /// Refuses images that the model with this name cannot read.
    ///
    /// # Errors
    /// There are images.
    pub(crate) fn refuse(&self, model: &str) -> Result<ResolvedImages, ApiError> {
        let problem = format!("this model reads text only: {model} has no vision tower");
        let files = self.files.values().map(|image| &image.path);
        let mut paths = files.chain(self.addresses.values().map(|address| &address.path));
        let refused = |path: &String| Err(image_error(path, &problem));
        paths.next().map_or_else(|| Ok(ResolvedImages::default()), refused)
    }
}

/// The base64 text of a `data:` URL.
fn base64_of(url: &str) -> Result<&str, String> {
    let scheme = scheme(url);
    if !scheme.eq_ignore_ascii_case("data") {
        return Err(unread(scheme));
    }
    let is_base64 = |kind: &str| {
        kind.split(';').skip(1).any(|parameter| parameter.trim().eq_ignore_ascii_case("base64"))
    };
    let data = url[scheme.len()..].split_once(',').filter(|(kind, _)| is_base64(kind));
    let expected = "expected a data: URL such as data:image/png;base64,...";
    data.map(|(_, data)| data).ok_or_else(|| format!("{expected}, got one without base64"))
}

/// Scheme of a URL, in any case.
fn scheme(url: &str) -> &str {
    url.split_once(':').map_or("", |(scheme, _)| scheme)
}

/// Problem of a URL with this scheme, whose image is not read.
fn unread(scheme: &str) -> String {
    let switch = "; --image-urls HOST allows https: addresses of HOST";
    let (got, switch) = match scheme.to_ascii_lowercase().as_str() {
        "http" => ("http:", switch),
        "https" => ("https:", switch),
        "file" => ("file:", ""),
        _ => ("another address", ""),
    };
    let remedy = "send the image as data:image/png;base64,...";
    format!("only data: URLs are read, got {got} ({remedy}{switch})")
}

/// Digest of an image, which is another one in another detail.
fn digest(parts: &[&[u8]], detail: ImageDetail) -> ImageDigest {
    let mut hasher = Sha256::new();
    hasher.update([u8::from(detail == ImageDetail::Low)]);
    parts.iter().for_each(|part| hasher.update(part));
    hasher.finalize().into()
}

/// Checks the size of an image's file.
///
/// # Errors
/// It is empty or over the limit.
fn check_len(len: usize, path: &str) -> Result<(), ApiError> {
    if (1..=MAX_BYTES).contains(&len) {
        return Ok(());
    }
    let problem = format!("expected an image of 1 to {MAX_BYTES} bytes, got {len}");
    Err(image_error(path, &problem))
}

fn image_error(path: &str, problem: &str) -> ApiError {
    ApiError::invalid(path, format!("{path}: {problem}"))
}

#[cfg(test)]
mod tests {
    use moeflux::base::ImageError;
    use serde_json::{Value, json};

    use super::*;
    use crate::requests::seen_images::with_fields;

    fn add(table: &mut ImageTable, part: &Value) -> Result<ImageDigest, String> {
        with_fields(part, |part| table.add_part(part).map_err(|error| error.message().to_owned()))
    }

    #[test]
    fn urls_of_base64_are_files() {
        for url in [
            "data:image/png;base64,Y2F0",
            "data:;base64,Y2F0",
            "DATA:text/plain;charset=utf-8;Base64,Y2F0",
            "data:image/png;base64;name=x.png,Y2\r\nF0\n",
        ] {
            let mut table = ImageTable::default();
            let digest = add(&mut table, &json!({"image_url": url})).unwrap();
            assert_eq!(digest, *Sha256::digest("\0cat"), "{url}");
            assert_eq!(table.files[&digest].file, "cat");
        }
        for (url, problem) in [
            ("data:,x", "image_url: expected a data: URL such as"),
            ("data:base64,Y2F0", "got one without base64"),
            ("data:image/png;base64", "got one without base64"),
            ("data:image/png;base64,", "expected an image of 1 to 20971520 bytes, got 0"),
            ("data:image/png;base64,Y2F%30", "expected base64, got '%' at byte 3"),
            (
                "HTTP://secret.example/x",
                "got http: (send the image as data:image/png;base64,...; --",
            ),
            ("file:///etc/secret", "got file: (send the image as data:image/png;base64,...)"),
            ("secret.png", "got another address"),
            ("", "got another address"),
        ] {
            let error = add(&mut ImageTable::default(), &json!({"image_url": url})).unwrap_err();
            assert!(error.contains(problem) && !error.contains("secret"), "{url}: {error}");
        }
    }

    #[test]
    fn an_address_is_once_in_the_table_for_each_detail() {
        let mut table = ImageTable::default();
        let url = "HTTPS://host.example/secret";
        let part = json!({"image_url": url});
        let low = json!({"image_url": {"url": url, "detail": "low"}});
        let [first, again, low] = [&part, &part, &low].map(|part| add(&mut table, part).unwrap());
        assert!(first == again && first != low && table.addresses.len() == 2);
        let refused = table.refuse_addresses().unwrap_err();
        let words = "; --image-urls HOST allows https: addresses of HOST)";
        assert!(refused.message().ends_with(words), "{}", refused.message());
        let refused = table.clone().resolve([].into_iter(), |_| Err(Error::Cancelled));
        let refused = refused.unwrap_err();
        assert!(refused.message().contains("images are not fetched here: send them as data:"));
        assert!(table.refuse("tales").is_err());
        while let Some((digest, address)) = table.take_address() {
            assert!(!address.error("why").message().contains("secret"));
            table.add_fetched(digest, address, "cat".into()).unwrap();
        }
        assert_eq!((table.files[&first].detail, table.bytes()), (ImageDetail::Auto, 6));
        // In a later request it is fetched already.
        assert_eq!(add(&mut table, &part), Ok(first));
        assert!(!table.has_addresses());
        let long = vec![b'x'; MAX_BYTES + 1];
        for (file, len) in [(Vec::new(), 0), (long, MAX_BYTES + 1)] {
            let address =
                ImageAddress { url: url.into(), detail: ImageDetail::Auto, path: "p".into() };
            let error = table.add_fetched(first, address, file.into()).unwrap_err();
            assert_eq!(
                error.message(),
                format!("p: expected an image of 1 to 20971520 bytes, got {len}")
            );
        }
    }

    #[test]
    fn a_file_is_once_in_the_table_for_each_detail() {
        let mut table = ImageTable::default();
        let url = "data:;base64,Y2F0";
        let string = json!({"image_url": url});
        let parts =
            ["auto", "high", "original"].map(|detail| json!({"url": url, "detail": detail}));
        let first = add(&mut table, &string).unwrap();
        for part in parts {
            assert_eq!(add(&mut table, &json!({"image_url": part})), Ok(first));
        }
        let low = add(&mut table, &json!({"image_url": url, "detail": "low"})).unwrap();
        assert_eq!((table.files.len(), table.bytes()), (2, 6));
        let details = [first, low].map(|digest| table.files[&digest].detail);
        assert_eq!(details, [ImageDetail::Auto, ImageDetail::Low]);
        let error = add(&mut table, &json!({"image_url": url, "detail": "tiny"})).unwrap_err();
        assert_eq!(error, "detail must be low, high, auto or original");
        // The same file counts each time.
        (5..MAX_IMAGES).for_each(|_| assert_eq!(add(&mut table, &string), Ok(first)));
        let error = add(&mut table, &string).unwrap_err();
        assert_eq!(error, "image_url: expected at most 32 images in a request, got more");
    }

    #[test]
    fn a_file_over_the_limit_is_not_decoded() {
        let add = |bytes: usize, end: &str| {
            let text = "A".repeat(bytes / 3 * 4) + end;
            ImageTable::default().add(&text, "images[0]", ImageDetail::Auto).unwrap_err()
        };
        // Both texts are wrong, but only one is looked at.
        let error = add(MAX_BYTES, "AAA-");
        let words = "images[0]: expected an image of 1 to 20971520 bytes, got 20971521";
        assert_eq!(error.message(), words);
        let error = add(MAX_BYTES, "AA-");
        assert!(error.message().contains("expected base64, got '-' at"), "{}", error.message());
    }

    #[test]
    fn errors_of_a_model_name_the_place_of_the_image() {
        let mut table = ImageTable::default();
        add(&mut table, &json!({"image_url": {"url": "data:;base64,Y2F0"}})).unwrap();
        let error = table.refuse("tales").unwrap_err();
        let words = "image_url.url: this model reads text only: tales has no vision tower";
        assert_eq!(error.message(), words);
        assert!(ImageTable::default().refuse("tales").is_ok());
        let problem = ImageError::TooManyBytes { bytes: 3, most: 2 };
        let failed = |error: fn(ImageError) -> Error| {
            let error = error(ImageError::TooManyBytes { bytes: 3, most: 2 });
            let mut error = Some(error);
            let read = |_: &SentImage| Err(error.take().unwrap());
            table.clone().continued("before").resolve([].into_iter(), read).unwrap_err()
        };
        assert_eq!(failed(Error::Image).message(), format!("before: {problem}"));
        assert_eq!(failed(|_| Error::Cancelled).message(), Error::Cancelled.to_string());
    }
}
