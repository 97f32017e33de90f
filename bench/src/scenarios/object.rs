//! The object layer by itself: what its retries, limits and counts cost over the bare client.

use std::sync::Arc;

use anyhow::Result;
use forebay_core::ObjectKey;
use forebay_io::mem::Pool;
use forebay_io::object::{Bucket, Condition, StoreSettings};
use futures::stream::{StreamExt, TryStreamExt};

use super::common::{cpu_a_gib, mib_a_second};
use crate::context::{Context, IN_FLIGHT, PART, names, noise};
use crate::raw::{HttpClient, ObjectStoreClient};
use crate::report::{Aim, Row};
use crate::sample::{Pairs, Sample, measure};
use crate::store::{PaceSettings, StoreProcess};

const NAME: &str = "object";
/// Small objects of one run.
const SMALL: usize = 4000;

pub(super) fn run(context: &Context) -> Result<Vec<Row>> {
    let store = StoreProcess::start(PaceSettings::default())?;
    let client = ObjectStoreClient::new(&store)?;
    let bucket = context.wait(open(&store))?;
    context.put_large(&client, "large", context.settings.large)?;
    context.put_files(&client, "small", SMALL, 4096)?;
    let mut rows = large_gets(context, &store, &client, &bucket)?;
    rows.extend(small_gets(context, &client, &bucket)?);
    rows.extend(uploads(context, &client, &bucket)?);
    Ok(rows)
}

async fn open(store: &StoreProcess) -> Result<Bucket> {
    let option = |name: &str| name.strip_prefix("AWS_").map(|_| name.to_ascii_lowercase());
    let options = store.environment().into_iter();
    let options = options.filter(|(name, _)| name != "AWS_ENDPOINT_URL");
    let options = options.filter_map(|(name, value)| Some((option(&name)?, value))).collect();
    let url = format!("s3://{}", StoreProcess::BUCKET).parse()?;
    Ok(Bucket::open(&url, &StoreSettings { options, ..Default::default() }).await?)
}

fn large_gets(
    context: &Context,
    store: &StoreProcess,
    client: &ObjectStoreClient,
    bucket: &Bucket,
) -> Result<Vec<Row>> {
    let (size, http) = (context.settings.large, HttpClient::new(store));
    let (key, pool) = (ObjectKey::new("large"), Pool::new(PART as usize, IN_FLIGHT));
    // In tasks, as in the daemon and in the baseline: the thread that waits here is none of the runtime's.
    let ours = || {
        let blocks = (0..size.div_ceil(PART)).map(|index| {
            let (bucket, key, pool) = (bucket.clone(), key.clone(), pool.clone());
            tokio::spawn(async move {
                let range = index * PART..size.min((index + 1) * PART);
                let mut buffer = pool.take((range.end - range.start) as usize);
                bucket.get_into(&key, None, range, &mut buffer).await?;
                Ok::<_, anyhow::Error>(buffer.len() as f64)
            })
        });
        let blocks = futures::stream::iter(blocks).buffered(IN_FLIGHT).map(|joined| joined?);
        measure(None, || context.wait(blocks.try_fold(0.0, async |sum, bytes| Ok(sum + bytes))))
    };
    let bare = || {
        let get = client.get_ranges("large", size, PART);
        measure(None, || Ok(context.wait(get)? as f64))
    };
    let http = || {
        let get = http.get_ranges("large", size, PART, IN_FLIGHT);
        measure(None, || Ok(context.wait(get)? as f64))
    };
    let pairs = Pairs::run(context.settings.pairs, ours, bare)?;
    let with_http = Pairs::run(context.settings.pairs, ours, http)?;
    let get = "GET of a large object in parts, into buffers";
    Ok(vec![
        row(get, "MiB/s", &pairs, mib_a_second, "object_store").aim(Aim::RatioAtLeast(0.95)),
        row(get, "CPU s/GiB", &pairs, cpu_a_gib, "object_store").aim(Aim::AtMost(0.7)),
        row(get, "MiB/s", &with_http, mib_a_second, "bare HTTP").aim(Aim::RatioAtLeast(0.9)),
    ])
}

fn small_gets(context: &Context, client: &ObjectStoreClient, bucket: &Bucket) -> Result<Vec<Row>> {
    let keys: Vec<String> = names(SMALL).map(|name| format!("small/{name}")).collect();
    let ours = || {
        measure(None, || {
            let gets = keys.iter().map(|key| {
                let (bucket, key) = (bucket.clone(), ObjectKey::new(key.as_str()));
                async move {
                    let task = tokio::spawn(async move { bucket.get(&key, None, 0..4096).await });
                    Ok::<_, anyhow::Error>(task.await??.len() as f64)
                }
            });
            let got = futures::stream::iter(gets).buffer_unordered(16);
            context.wait(got.try_fold(0.0, async |sum, bytes| Ok(sum + bytes)))
        })
    };
    let bare = || measure(None, || Ok(context.wait(client.get_many(&keys, 16))? as f64));
    let pairs = Pairs::run(context.settings.pairs, ours, bare)?;
    let each = |sample: &Sample| SMALL as f64 / sample.seconds;
    let cpu = |sample: &Sample| sample.client_cpu / SMALL as f64 * 1e6;
    let get = "GET of 4 KiB objects, 16 in flight";
    Ok(vec![
        row(get, "a second", &pairs, each, "object_store").aim(Aim::RatioAtLeast(0.95)),
        row(get, "CPU us each", &pairs, cpu, "object_store"),
    ])
}

fn uploads(context: &Context, client: &ObjectStoreClient, bucket: &Bucket) -> Result<Vec<Row>> {
    let (part, parts) = (noise(PART as usize), context.settings.large.div_ceil(PART) as usize);
    let (key, part) = (ObjectKey::new("written"), Arc::new(part));
    let total = (parts as u64 * PART) as f64;
    let ours = || {
        measure(None, || {
            context.wait(async {
                let mut upload = bucket.upload(&key).await?;
                for _ in 0..parts {
                    upload.write(part.as_ref().clone()).await?;
                }
                upload.complete(Condition::Always).await?;
                Ok(total)
            })
        })
    };
    let bare = || {
        let put = client.put_multipart("written", part.as_ref().clone(), parts);
        measure(None, || context.wait(put).map(|()| total))
    };
    let pairs = Pairs::run(context.settings.pairs, ours, bare)?;
    let put = "multipart PUT of a large object";
    Ok(vec![
        row(put, "MiB/s", &pairs, mib_a_second, "object_store").aim(Aim::RatioAtLeast(0.95)),
        row(put, "CPU s/GiB", &pairs, cpu_a_gib, "object_store"),
    ])
}

fn row(name: &str, unit: &str, pairs: &Pairs, figure: impl Fn(&Sample) -> f64, baseline: &str) -> Row {
    Row::of_pairs(NAME, name, unit, &pairs.figures(figure), baseline)
}
