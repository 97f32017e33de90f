//! Bucket URLs: `s3://bucket/prefix`, `gs://`, `az://`, `file:///directory`.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use forebay_core::{Error, Result};

/// The kind of store that a URL names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scheme {
    /// Amazon S3 or a service that speaks its protocol.
    S3,
    /// Google Cloud Storage.
    Gcs,
    /// Azure Blob Storage.
    Azure,
    /// A directory of a local or shared file system.
    File,
}

/// A bucket and a prefix in it (for `file://`, a directory and no prefix).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BucketUrl {
    /// The kind of store.
    pub scheme: Scheme,
    /// Bucket or container name; empty for `file://`.
    pub bucket: String,
    /// Key prefix without slashes at its ends; for `file://` the absolute directory.
    pub prefix: String,
}

impl BucketUrl {
    /// The directory of a `file://` URL.
    pub fn directory(&self) -> Option<PathBuf> {
        (self.scheme == Scheme::File).then(|| PathBuf::from(&self.prefix))
    }

    /// The same bucket, one or more segments deeper.
    pub fn join(&self, segment: &str) -> Self {
        let prefix = match (self.prefix.is_empty(), self.scheme) {
            (true, Scheme::S3 | Scheme::Gcs | Scheme::Azure) => segment.to_owned(),
            _ => format!("{}/{segment}", self.prefix),
        };
        Self { prefix, ..self.clone() }
    }
}

impl FromStr for BucketUrl {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let hint = "write s3://bucket/prefix, gs://bucket/prefix, az://container/prefix or file:///directory";
        let bad = |why: &str| Error::invalid(format!("`{text}` is not a bucket URL: {why}")).with_hint(hint);
        let (scheme, rest) = text.split_once("://").ok_or_else(|| {
            bad("it has no scheme").with_hint(format!("{hint}; `forebay status` shows that of a mount"))
        })?;
        let scheme = match scheme.to_ascii_lowercase().as_str() {
            "s3" => Scheme::S3,
            "gs" => Scheme::Gcs,
            "az" => Scheme::Azure,
            "file" => Scheme::File,
            "http" | "https" => {
                return Err(bad("it names a server").with_hint(
                    "write s3://bucket/prefix, and the server in AWS_ENDPOINT_URL if it is not Amazon's",
                ));
            }
            other => return Err(bad(&format!("`{other}` is no known scheme"))),
        };
        if scheme == Scheme::File {
            let directory = rest.trim_end_matches('/');
            if !Path::new(rest).is_absolute() || directory.is_empty() {
                return Err(bad("a file URL needs an absolute directory"));
            }
            return Ok(Self { scheme, bucket: String::new(), prefix: directory.to_owned() });
        }
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        if bucket.is_empty() {
            return Err(bad("it names no bucket"));
        }
        Ok(Self { scheme, bucket: bucket.to_owned(), prefix: prefix.trim_matches('/').to_owned() })
    }
}

impl fmt::Display for BucketUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = match self.scheme {
            Scheme::S3 => "s3",
            Scheme::Gcs => "gs",
            Scheme::Azure => "az",
            Scheme::File => return write!(f, "file://{}", self.prefix),
        };
        match self.prefix.as_str() {
            "" => write!(f, "{scheme}://{}", self.bucket),
            prefix => write!(f, "{scheme}://{}/{prefix}", self.bucket),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_round_trip() {
        for text in ["s3://b", "s3://b/a/c", "gs://b/x", "az://c", "file:///srv/bucket"] {
            assert_eq!(text.parse::<BucketUrl>().expect(text).to_string(), text);
        }
        assert_eq!("S3://b".parse::<BucketUrl>().expect("schemes have no case").to_string(), "s3://b");
        let server = "https://host/b".parse::<BucketUrl>().expect_err("a server");
        assert!(server.hint().is_some_and(|hint| hint.contains("AWS_ENDPOINT_URL")), "{server}");
        for text in ["b", "s3://", "ftp://x", "file://relative", "file:///"] {
            assert!(text.parse::<BucketUrl>().is_err(), "{text}");
        }
        let url: BucketUrl = "s3://b/run7/".parse().expect("url");
        assert_eq!(url.join("step-1").to_string(), "s3://b/run7/step-1");
    }
}
