//! Where an S3 bucket is asked: what AWS's own tools obey of the environment and the profile, and object_store does not know.
//!
//! An endpoint that somebody names is taken as it is, but that a bucket which is to be in the host's name is put there. Where
//! none is named, AWS's own follows from the region. Variables that are obeyed by nobody are told of, once.

use std::collections::BTreeMap;
use std::sync::Once;

use forebay_core::{Error, Result};
use url::{Host, Url};

/// What other tools obey and nothing here does, and what to do instead.
const IGNORED: [(&str, &str); 5] = [
    ("aws_default_profile", "set AWS_PROFILE"),
    ("aws_max_attempts", "requests are tried again until deadline_ms of [volume.store]"),
    ("aws_retry_mode", "requests are tried again until deadline_ms of [volume.store]"),
    (
        "aws_request_checksum_calculation",
        "set AWS_CHECKSUM_ALGORITHM=SHA256 for a bucket that wants checksums",
    ),
    (
        "aws_ignore_configured_endpoint_urls",
        "unset AWS_ENDPOINT_URL, and take endpoint_url out of the profile",
    ),
];

/// What is wanted of the endpoint.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Wishes {
    values: BTreeMap<&'static str, String>,
}

impl Wishes {
    const FIPS: &str = "aws_use_fips_endpoint";
    const DUAL_STACK: &str = "aws_use_dualstack_endpoint";
    const CERTIFICATES: &str = "aws_ca_bundle";

    /// Takes a value by its lower-case name; false where it is none of these.
    pub(super) fn take(&mut self, name: &str, value: &str) -> bool {
        let known =
            [Self::FIPS, Self::DUAL_STACK, Self::CERTIFICATES].into_iter().find(|known| *known == name);
        known.map(|known| self.values.insert(known, value.to_owned())).is_some()
    }

    /// The file of authorities to trust besides the system's.
    pub(super) fn certificates(&self) -> Option<&str> {
        self.values.get(Self::CERTIFICATES).map(String::as_str)
    }

    fn is_set(&self, name: &str) -> Result<bool> {
        match self.values.get(name).map(|value| value.to_ascii_lowercase()).as_deref() {
            None | Some("" | "false" | "0") => Ok(false),
            Some("true" | "1") => Ok(true),
            Some(other) => {
                Err(Error::invalid(format!("{} is `{other}`, not true or false", name.to_ascii_uppercase())))
            }
        }
    }

    /// AWS's own endpoint of a region, where it is another one than object_store takes.
    ///
    /// # Errors
    /// `Invalid` for a value that is not true or false.
    pub(super) fn of_region(&self, region: &str) -> Result<Option<String>> {
        let (fips, dual_stack) = (self.is_set(Self::FIPS)?, self.is_set(Self::DUAL_STACK)?);
        let is_chinese = region.starts_with("cn-");
        if !fips && !dual_stack && !is_chinese {
            return Ok(None);
        }
        let service = if fips { "s3-fips" } else { "s3" };
        let stack = if dual_stack { ".dualstack" } else { "" };
        let domain = if is_chinese { "amazonaws.com.cn" } else { "amazonaws.com" };
        Ok(Some(format!("https://{service}{stack}.{region}.{domain}")))
    }

    /// Tells, once, of what an endpoint that is named decides by itself.
    ///
    /// # Errors
    /// As [`Self::of_region`].
    pub(super) fn give_way(&self, endpoint: &str) -> Result<()> {
        if self.is_set(Self::FIPS)? || self.is_set(Self::DUAL_STACK)? {
            static TOLD: Once = Once::new();
            TOLD.call_once(|| {
                tracing::warn!(
                    endpoint,
                    "AWS_USE_FIPS_ENDPOINT and AWS_USE_DUALSTACK_ENDPOINT choose among AWS's own: the endpoint that is set stands"
                );
            });
        }
        Ok(())
    }
}

/// Tells, once, of variables that other tools obey and nothing here does; names are in lower case.
pub(super) fn warn_of_ignored(environment: &[(String, String)]) {
    static TOLD: Once = Once::new();
    TOLD.call_once(|| {
        for (name, instead) in ignored(environment) {
            tracing::warn!(variable = name.to_ascii_uppercase(), instead, "a variable is not obeyed");
        }
    });
}

fn ignored(environment: &[(String, String)]) -> impl Iterator<Item = (&'static str, &'static str)> {
    IGNORED.into_iter().filter(|(name, _)| environment.iter().any(|(given, _)| given == name))
}

/// The endpoint with the bucket in its host's name, as stores want it that take no other requests. One that has it, or is an
/// address, stays as it is.
pub(super) fn with_bucket(endpoint: &str, bucket: &str) -> String {
    let Ok(mut url) = Url::parse(endpoint) else { return endpoint.to_owned() };
    let Some(Host::Domain(host)) = url.host() else { return endpoint.to_owned() };
    if host.strip_prefix(bucket).is_some_and(|rest| rest.starts_with('.')) {
        return endpoint.to_owned();
    }
    let host = format!("{bucket}.{host}");
    match url.set_host(Some(&host)) {
        Ok(()) => url.as_str().trim_end_matches('/').to_owned(),
        Err(_) => endpoint.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wishes(values: &[(&str, &str)]) -> Wishes {
        let mut wishes = Wishes::default();
        assert!(values.iter().all(|(name, value)| wishes.take(name, value)));
        wishes
    }

    /// AWS_REGION=cn-north-1 named a host that does not exist, and the FIPS endpoints that a policy wants were not asked.
    #[test]
    fn the_endpoint_follows_from_region_fips_and_dual_stack() {
        let (fips, dual) = (("aws_use_fips_endpoint", "true"), ("aws_use_dualstack_endpoint", "True"));
        for (region, values, expected) in [
            ("us-east-1", vec![], None),
            ("us-east-1", vec![("aws_use_fips_endpoint", "false")], None),
            ("cn-north-1", vec![], Some("https://s3.cn-north-1.amazonaws.com.cn")),
            ("cn-northwest-1", vec![dual], Some("https://s3.dualstack.cn-northwest-1.amazonaws.com.cn")),
            ("us-gov-west-1", vec![fips], Some("https://s3-fips.us-gov-west-1.amazonaws.com")),
            ("eu-west-1", vec![dual], Some("https://s3.dualstack.eu-west-1.amazonaws.com")),
            ("us-east-2", vec![fips, dual], Some("https://s3-fips.dualstack.us-east-2.amazonaws.com")),
        ] {
            let found = wishes(&values).of_region(region).expect("values that parse");
            assert_eq!(found.as_deref(), expected, "{region} {values:?}");
        }
        let error =
            wishes(&[("aws_use_fips_endpoint", "maybe")]).of_region("us-east-1").expect_err("no boolean");
        assert!(error.message().contains("AWS_USE_FIPS_ENDPOINT is `maybe`"), "{error}");
        assert!(!Wishes::default().take("aws_region", "x"));
    }

    #[test]
    fn a_bucket_is_put_into_the_host_where_it_is_not() {
        for (endpoint, expected) in [
            ("https://oss-cn-hangzhou.aliyuncs.com", "https://data.oss-cn-hangzhou.aliyuncs.com"),
            ("https://cos.ap-guangzhou.myqcloud.com/", "https://data.cos.ap-guangzhou.myqcloud.com"),
            ("https://data.oss-cn-hangzhou.aliyuncs.com", "https://data.oss-cn-hangzhou.aliyuncs.com"),
            ("http://database.example.com:9000", "http://data.database.example.com:9000"),
            ("http://127.0.0.1:9000", "http://127.0.0.1:9000"),
            ("http://[::1]:9000", "http://[::1]:9000"),
        ] {
            assert_eq!(with_bucket(endpoint, "data"), expected);
        }
    }

    #[test]
    fn variables_that_nothing_obeys_are_named_with_the_way_round() {
        let set = |name: &str| (name.to_owned(), "x".to_owned());
        let found: Vec<_> = ignored(&[set("aws_retry_mode"), set("aws_region")]).collect();
        assert_eq!(found.len(), 1);
        assert!(found[0].0 == "aws_retry_mode" && found[0].1.contains("deadline_ms"), "{found:?}");
    }
}
