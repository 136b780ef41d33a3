//! Files of a repository at a revision, as the server lists them.

use std::fmt;

use serde::{
    Deserialize, Deserializer,
    de::{Error, SeqAccess, Visitor},
};

use crate::{
    client::Client,
    digest::Digest,
    error::HubError,
    file_path::FilePath,
    json,
    model_name::{HEAD, ModelName},
};

/// Bytes of a file, at most: bounds what is kept in memory for each block of it.
const MAX_FILE: u64 = 1 << 44;

/// A repository's files at a commit.
#[derive(Clone, Debug)]
pub struct Listing {
    /// Commit that the revision stands for.
    pub commit: String,
    /// The files, in the order of the server.
    pub files: Vec<RemoteFile>,
    /// Names of files that are no names on this system, or could leave the cache.
    pub(crate) refused: Vec<String>,
}

/// A file on the server.
#[derive(Clone, Debug)]
pub struct RemoteFile {
    /// Path in the repository.
    pub path: FilePath,
    /// Size in bytes, if the list has it.
    pub size: Option<u64>,
    /// Digest of the contents, if the list has it.
    pub(crate) digest: Option<Digest>,
}

/// Size and identity of a file's contents.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Contents {
    pub(crate) size: u64,
    /// Name of the contents in the cache: the digest, or the server's entity tag.
    pub(crate) tag: String,
    pub(crate) digest: Option<Digest>,
}

impl Listing {
    /// Asks the server for the files of a revision.
    ///
    /// # Errors
    /// The server does not know the model, denies access or answers in another form.
    pub(crate) fn request(
        client: &Client,
        model: &ModelName,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<Self, HubError> {
        let revision = model.revision().unwrap_or(HEAD).replace('/', "%2F").replace('+', "%2B");
        let path = format!("api/models/{}/revision/{revision}?blobs=true", model.repository());
        let url = client.address(&path);
        client.json(&url, |body| json::read(body), is_cancelled)
    }
}

impl RemoteFile {
    /// Size and identity of the contents, by the list or by a request.
    ///
    /// # Errors
    /// The request fails, or its answer lacks a size or an entity tag.
    pub(crate) fn contents(
        &self,
        client: &Client,
        url: &str,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<Contents, HubError> {
        let bounded = |size| match size <= MAX_FILE {
            true => Ok(size),
            false => Err(HubError::Answer {
                url: url.to_owned(),
                problem: format!("the server says a size of {size} bytes: no file is so large"),
            }),
        };
        if let (Some(size), Some(digest)) = (self.size, &self.digest) {
            let tag = digest.hex().to_owned();
            return Ok(Contents { size: bounded(size)?, tag, digest: Some(digest.clone()) });
        }
        let answer = client.head(url, is_cancelled)?;
        let lacks = |what: &str| HubError::Answer {
            url: url.to_owned(),
            problem: format!("the server says no {what} of this file"),
        };
        let direct = if (300..400).contains(&answer.status) { None } else { answer.length };
        let size = answer.linked_size.or(direct).or(self.size).ok_or_else(|| lacks("size"))?;
        let tag = answer.tag.filter(|tag| is_tag(tag)).ok_or_else(|| lacks("entity tag"))?;
        let digest = Digest::from_tag(&tag);
        Ok(Contents { size: bounded(size)?, tag, digest })
    }
}

/// Whether an entity tag may name a file of the cache.
fn is_tag(tag: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
    (8..=128).contains(&tag.len()) && tag.bytes().all(is_plain)
}

/// The server's answer.
#[derive(Deserialize)]
struct ModelInfo {
    sha: String,
    siblings: Siblings,
}

/// A list of files.
#[derive(Default)]
struct Siblings {
    files: Vec<RemoteFile>,
    refused: Vec<String>,
}

/// A file of the list.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    blob_id: Option<String>,
    lfs: Option<LargeFile>,
}

/// The pointer of a file that git does not have.
#[derive(Deserialize)]
struct LargeFile {
    size: Option<u64>,
    sha256: Option<String>,
    oid: Option<String>,
}

impl<'de> Deserialize<'de> for Listing {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let ModelInfo { sha, siblings: Siblings { files, refused } } =
            ModelInfo::deserialize(deserializer)?;
        match Digest::from_tag(&sha) {
            Some(Digest::GitBlob(commit)) => Ok(Self { commit, files, refused }),
            _ => Err(D::Error::custom("the commit `sha` has other than 40 hexadecimal digits")),
        }
    }
}

impl<'de> Deserialize<'de> for Siblings {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(SiblingsVisitor)
    }
}

struct SiblingsVisitor;

impl<'de> Visitor<'de> for SiblingsVisitor {
    type Value = Siblings;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of files")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Siblings, A::Error> {
        let mut siblings = Siblings::default();
        let mut count = 0;
        while let Some(Sibling { rfilename, size, blob_id, lfs }) = list.next_element()? {
            count += 1;
            json::check_file(count, &rfilename)?;
            let Ok(path) = FilePath::new(&rfilename) else {
                siblings.refused.push(rfilename);
                continue;
            };
            let digest = |tag: Option<String>| Digest::from_tag(&tag?);
            siblings.files.push(match lfs {
                Some(lfs) => RemoteFile {
                    path,
                    size: lfs.size.or(size),
                    digest: digest(lfs.sha256).or_else(|| digest(lfs.oid)),
                },
                None => RemoteFile { path, size, digest: digest(blob_id) },
            });
        }
        Ok(siblings)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::json::MAX_FILES;

    const COMMIT: &str = "ce013625030ba8dba906f756967f9e9ca394464a";

    fn parse(text: &str) -> Result<Listing, String> {
        json::read(text.as_bytes()).map_err(|error| error.to_string())
    }

    fn problem(text: &str) -> String {
        match parse(text) {
            Ok(listing) => panic!("{listing:?}"),
            Err(problem) => problem,
        }
    }

    #[test]
    fn a_list_has_sizes_and_digests() {
        let sha = "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03";
        let listing = parse(&format!(
            r#"{{"sha": "{COMMIT}", "siblings": [
                {{"rfilename": "config.json", "size": 6, "blobId": "{COMMIT}"}},
                {{"rfilename": "a/b.gguf", "size": 134, "blobId": "{COMMIT}",
                  "lfs": {{"sha256": "{sha}", "size": 7, "pointerSize": 134}}}},
                {{"rfilename": "README.md"}}]}}"#
        ));
        let Ok(listing) = listing else { panic!("not read") };
        assert_eq!(listing.commit, COMMIT);
        let sizes: Vec<_> = listing.files.iter().map(|file| file.size).collect();
        assert_eq!(sizes, [Some(6), Some(7), None]);
        assert_eq!(listing.files[1].digest, Some(Digest::Sha256(sha.into())));
        assert_eq!(listing.files[2].digest, None);
    }

    #[test]
    fn lists_of_another_form_say_what_is_missing() {
        assert!(problem("<html>").contains("expected value"));
        assert!(problem("{}").contains("sha"));
        assert!(problem(r#"{"sha": "../../x", "siblings": []}"#).contains("40"));
        assert!(problem(&format!(r#"{{"sha": "{COMMIT}"}}"#)).contains("siblings"));
        let list = |file: &str| format!(r#"{{"sha": "{COMMIT}", "siblings": [{file}]}}"#);
        assert!(problem(&list("{}")).contains("rfilename"));
        for name in ["../x", r"C:\\x"] {
            let file = format!(r#"{{"rfilename": "{name}"}}"#);
            let listing = parse(&list(&file)).unwrap();
            assert_eq!((listing.files.len(), listing.refused.len()), (0, 1), "{name}");
        }
    }

    #[test]
    fn lists_are_bounded() {
        let list = |files: &str| format!(r#"{{"sha": "{COMMIT}", "siblings": [{files}]}}"#);
        let files = |count| vec![r#"{"rfilename": "x"}"#; count].join(",");
        assert_eq!(parse(&list(&files(MAX_FILES))).unwrap().files.len(), MAX_FILES);
        let error = problem(&list(&files(MAX_FILES + 1)));
        assert!(error.contains("at most 100000 files"), "{error}");
        let name = "x".repeat(5000);
        let error = problem(&list(&format!(r#"{{"rfilename": "{name}"}}"#)));
        assert!(error.contains("4096") && error.contains("5000"), "{error}");
    }
}
