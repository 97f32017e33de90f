//! The storage class of what is written: one of Amazon's or Google's, or an access tier of Azure's.
//!
//! It is for what stays: files, blobs and checkpoints. The tree's own objects are small and replaced within minutes, and cold
//! classes are charged for a month at least: those take the bucket's own class, and so does what an upload leaves aside until
//! it is copied to its key. The probe's objects take it as well, so that a class that the store does not know is told when the
//! bucket is mounted.

use forebay_core::{Error, Result};
use object_store::path::Path;
use object_store::{Attribute, Attributes};

use crate::object::{BucketUrl, Scheme};

/// Below these of Forebay's own folders lies what gets the class.
const OWN: &str = ".forebay/";
const CLASSED: [&str; 2] = [".forebay/blobs/", ".forebay/probe/"];

/// Classes of which nothing can be read before it was restored, which takes hours.
const ARCHIVED: [&str; 3] = ["GLACIER", "DEEP_ARCHIVE", "SNOW"];
/// Azure's tiers that can be read.
const TIERS: [&str; 3] = ["Hot", "Cool", "Cold"];
/// Longest name: far longer than any there is.
const LONGEST: usize = 64;

/// The class, and what it is for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct StorageClass {
    name: Option<String>,
    /// That of the bucket's URL: empty, or with a slash at its end.
    prefix: String,
}

impl StorageClass {
    /// The class of this name for what is written below `url`.
    ///
    /// # Errors
    /// `Invalid` for what is no class, or one that could not be read. Whether the store has it is the store's to say.
    pub(super) fn of_bucket(url: &BucketUrl, name: Option<String>) -> Result<Self> {
        let name = name.map(|name| checked(url.scheme, &name)).transpose()?;
        let prefix = if url.prefix.is_empty() { String::new() } else { format!("{}/", url.prefix) };
        Ok(Self { name, prefix })
    }

    pub(super) fn into_name(self) -> Option<String> {
        self.name
    }

    /// What `key` is to be written with, if not with the bucket's own.
    pub(super) fn of(&self, key: &Path) -> Option<&str> {
        let name = self.name.as_deref()?;
        let key = key.as_ref().strip_prefix(&self.prefix).unwrap_or(key.as_ref());
        let is_for_good = !key.starts_with(OWN) || CLASSED.iter().any(|folder| key.starts_with(folder));
        is_for_good.then_some(name)
    }

    /// Puts it where object_store looks for it.
    pub(super) fn mark(&self, key: &Path, attributes: &mut Attributes) {
        if let Some(class) = self.of(key) {
            attributes.insert(Attribute::StorageClass, class.to_owned().into());
        }
    }
}

fn checked(scheme: Scheme, name: &str) -> Result<String> {
    let refused =
        |why: &str, hint: &str| Err(Error::invalid(format!("storage class `{name}`: {why}")).with_hint(hint));
    let is_name = !name.is_empty()
        && name.len() <= LONGEST
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-'));
    if !is_name {
        return refused("that is no name of one", "classes are named as STANDARD_IA or INTELLIGENT_TIERING");
    }
    let is = |other: &&str| other.eq_ignore_ascii_case(name);
    match scheme {
        Scheme::S3 if ARCHIVED.iter().any(is) => refused(
            "what is archived cannot be read before it was restored, and Forebay reads what it writes",
            "GLACIER_IR can be read at once; a lifecycle rule of the bucket may archive what nobody reads any more",
        ),
        Scheme::Azure => match TIERS.into_iter().find(is) {
            Some(tier) => Ok(tier.to_owned()),
            None => refused("Azure has no such tier that can be read at once", "it has Hot, Cool and Cold"),
        },
        _ => Ok(name.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn class(url: &str, name: &str) -> Result<StorageClass> {
        StorageClass::of_bucket(&url.parse().expect("a URL"), Some(name.to_owned()))
    }

    #[test]
    fn what_stays_gets_the_class_and_the_tree_does_not() {
        for (url, prefix) in [("s3://b", ""), ("s3://b/data/set", "data/set/")] {
            let class = class(url, "STANDARD_IA").expect("a class");
            let of = |key: &str| class.of(&Path::from(format!("{prefix}{key}"))).map(str::to_owned);
            for key in ["a", "a/.forebay/tree/x", ".forebayx", ".forebay/blobs/0/1", ".forebay/probe/1/x"] {
                assert_eq!(of(key).as_deref(), Some("STANDARD_IA"), "{key}");
            }
            for key in [".forebay/tree/wal/1", ".forebay/volume.json", ".forebay/uploads/1"] {
                assert_eq!(of(key), None, "{key}");
            }
        }
        assert_eq!(StorageClass::default().of(&Path::from("a")), None);
    }

    #[test]
    fn classes_are_checked_before_anything_is_written() {
        let name = |url: &str, name: &str| class(url, name).map(|class| class.name.expect("named"));
        for (url, given, taken) in [
            ("s3://b", "GLACIER_IR", "GLACIER_IR"),
            ("s3://b", "my-own_1", "my-own_1"),
            ("gs://b", "ARCHIVE", "ARCHIVE"),
            ("az://c", "cool", "Cool"),
        ] {
            assert_eq!(name(url, given).expect(given), taken);
        }
        for (url, given, why) in [
            ("s3://b", "", "no name"),
            ("s3://b", "STANDARD IA", "no name"),
            ("s3://b", "STANDARD\r\nx-amz-acl: public-read", "no name"),
            ("s3://b", "glacier", "restored"),
            ("s3://b", "DEEP_ARCHIVE", "restored"),
            ("az://c", "Archive", "no such tier"),
            ("az://c", "STANDARD_IA", "no such tier"),
        ] {
            let error = name(url, given).expect_err(given);
            assert!(error.message().contains(why) && error.hint().is_some(), "{error}");
        }
    }
}
