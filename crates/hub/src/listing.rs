//! Files of a repository at a revision, as the server lists them.

use serde_json::Value;

use crate::{
    client::{Client, repeat},
    digest::Digest,
    error::HubError,
    file_path::FilePath,
    model_name::{HEAD, ModelName},
};

/// Bytes of a list, at most.
const MAX_LIST: u64 = 64 << 20;

/// Files of a repository, at most: the Hub's own limit is lower.
const MAX_FILES: usize = 200_000;

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
        let text = client.text(&url, MAX_LIST, is_cancelled)?;
        parse(&text).map_err(|problem| HubError::Answer { url, problem })
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
        let answer = repeat(is_cancelled, || client.head(url))?;
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

/// # Errors
/// The list has another form.
fn parse(text: &str) -> Result<Listing, String> {
    let form = |problem: &str| problem.to_owned();
    let list: Value = serde_json::from_str(text).map_err(|error| format!("no JSON: {error}"))?;
    let commit = list.get("sha").and_then(Value::as_str).ok_or_else(|| form("no commit `sha`"))?;
    if !matches!(Digest::from_tag(commit), Some(Digest::GitBlob(_))) {
        return Err(form("the commit `sha` has other than 40 hexadecimal digits"));
    }
    let files = list.get("siblings").and_then(Value::as_array);
    let files = files.ok_or_else(|| form("no list of files, `siblings`"))?;
    if files.len() > MAX_FILES {
        return Err(format!("more than {MAX_FILES} files"));
    }
    let mut listing = Listing { commit: commit.to_owned(), files: vec![], refused: vec![] };
    for file in files {
        let path = file.get("rfilename").and_then(Value::as_str);
        let path = path.ok_or_else(|| form("a file without its name, `rfilename`"))?;
        let Ok(path) = FilePath::new(path) else {
            listing.refused.push(path.to_owned());
            continue;
        };
        let lfs = file.get("lfs").filter(|lfs| lfs.is_object());
        let size = |of: &Value| of.get("size").and_then(Value::as_u64);
        let digest = |of: &Value, key| Digest::from_tag(of.get(key)?.as_str()?);
        listing.files.push(RemoteFile {
            path,
            size: lfs.and_then(size).or_else(|| size(file)),
            digest: match lfs {
                Some(lfs) => digest(lfs, "sha256").or_else(|| digest(lfs, "oid")),
                None => digest(file, "blobId"),
            },
        });
    }
    Ok(listing)
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMMIT: &str = "ce013625030ba8dba906f756967f9e9ca394464a";

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
        assert!(problem("<html>").contains("no JSON"));
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
}
