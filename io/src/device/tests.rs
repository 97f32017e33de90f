//! Against a stand-in for the driver, which does nothing before somebody waits for it: see `fake_driver.c`.

use std::path::{Path, PathBuf};
use std::process::Command;

use libloading::Library;
use tempfile::TempDir;

use super::*;

/// The stand-in, built for one test, so that its calls are that test's alone.
struct Fake {
    library: Library,
    path: PathBuf,
    _directory: TempDir,
}

impl Fake {
    fn build() -> Self {
        let directory = tempfile::tempdir().expect("directory");
        let path = directory.path().join("libcuda.so.1");
        // Asked at run time: a build that is kept may come from a checkout elsewhere.
        let package = std::env::var_os("CARGO_MANIFEST_DIR").expect("tests are run by cargo");
        let source = Path::new(&package).join("src/device/fake_driver.c");
        let mut compiler = Command::new("cc");
        let built =
            compiler.args(["-shared", "-fPIC", "-Wall", "-Werror", "-o"]).arg(&path).arg(source).status();
        assert!(built.is_ok_and(|status| status.success()), "cc builds the stand-in");
        // SAFETY: it has no initialisers.
        let library = unsafe { Library::new(&path) }.expect("load");
        Self { library, path, _directory: directory }
    }

    fn device(&self) -> Arc<Device> {
        Device::open_by(&self.path, 0).expect("a device")
    }

    fn log(&self) -> Vec<String> {
        let mut text = vec![0u8; 1 << 16];
        // SAFETY: as fake_driver.c declares it; `text` has the room that it is told of.
        let length = unsafe {
            let take = self.library.get::<unsafe extern "C" fn(*mut u8, usize) -> usize>(b"fake_take_log\0");
            take.expect("a function")(text.as_mut_ptr(), text.len())
        };
        String::from_utf8_lossy(&text[..length]).lines().map(str::to_owned).collect()
    }

    fn fail(&self, call: &std::ffi::CStr) {
        // SAFETY: as fake_driver.c declares it.
        unsafe {
            let fail = self.library.get::<unsafe extern "C" fn(*const std::ffi::c_char, i32)>(b"fake_fail\0");
            fail.expect("a function")(call.as_ptr(), 999);
        }
    }

    /// Has the default stream fill `memory` with `value`, once somebody waits for that.
    fn fill(&self, memory: &mut [u8], value: u8) {
        type Fill = unsafe extern "C" fn(usize, *mut u8, i32, usize);
        // SAFETY: as fake_driver.c declares it; the test keeps `memory` until the end.
        unsafe {
            let fill = self.library.get::<Fill>(b"fake_fill\0").expect("a function");
            fill(0, memory.as_mut_ptr(), i32::from(value), memory.len());
        }
    }

    fn retained(&self) -> i32 {
        // SAFETY: as fake_driver.c declares it.
        unsafe {
            self.library.get::<unsafe extern "C" fn() -> i32>(b"fake_retained\0").expect("a function")()
        }
    }
}

fn bytes_of(device: &Arc<Device>, memory: &[u8]) -> DeviceBytes {
    // SAFETY: the test keeps `memory` until the copies have ended.
    unsafe { DeviceBytes::new(device.clone(), memory.as_ptr() as u64, memory.len()) }
}

#[test]
fn what_was_submitted_before_is_copied_and_what_comes_later_is_not() {
    let fake = Fake::build();
    let device = fake.device();
    let mut memory = vec![1u8; 1000];
    fake.fill(&mut memory[..400], 2);
    device.follow(0).expect("follow");
    fake.fill(&mut memory, 3);
    let (mut first, mut second) = (vec![0u8; 600], vec![0u8; 400]);
    let source = bytes_of(&device, &memory);
    let jobs =
        vec![(source.slice(0..600), first.as_mut_slice()), (source.slice(600..1000), second.as_mut_slice())];
    let arrived = fetch(jobs, |coming| {
        // Whoever waits for both: it is one moment.
        assert_eq!(coming[0].arrival(), coming[1].arrival());
        coming[1].arrival().wait()?;
        coming.into_iter().map(|coming| coming.wait().map(|bytes| bytes.to_vec())).collect::<Result<Vec<_>>>()
    });
    let arrived = arrived.expect("submitted").expect("arrived");
    assert_eq!(arrived, [[vec![2; 400], vec![1; 200]].concat(), vec![1; 400]]);
    let expected = ["record 0", "wait 0", "copy 600", "copy 400", "record 1", "arrive 1", "settle 1"];
    assert_eq!(fake.log(), expected);
    assert_eq!((memory[0], memory[999]), (2, 1), "nobody waited for what came later");
}

#[test]
fn everything_has_arrived_when_it_returns_whoever_waited() {
    let fake = Fake::build();
    let device = fake.device();
    let (memory, mut target) = (vec![7u8; 100], vec![0u8; 100]);
    fetch(vec![(bytes_of(&device, &memory), target.as_mut_slice())], drop).expect("fetch");
    assert_eq!(target, memory);
    let (far, mut near) = (vec![1u8; GROUP_BYTES + 5], vec![0u8; GROUP_BYTES + 5]);
    let source = bytes_of(&device, &far);
    let mut rest = near.as_mut_slice();
    let mut jobs = Vec::new();
    for range in [0..GROUP_BYTES, GROUP_BYTES..GROUP_BYTES + 2, GROUP_BYTES + 2..GROUP_BYTES + 5] {
        let (target, after) = rest.split_at_mut(range.len());
        jobs.push((source.slice(range), target));
        rest = after;
    }
    fake.log();
    let count = fetch(jobs, |coming| coming.len()).expect("fetch");
    let records = fake.log().iter().filter(|line| line.starts_with("record")).count();
    assert_eq!((count, records), (3, 2), "one event a group");
    assert_eq!(near, far);
}

#[test]
fn failures_are_told_and_leave_nothing_under_way() {
    let fake = Fake::build();
    let device = fake.device();
    let (memory, mut target) = (vec![7u8; 100], vec![0u8; 100]);
    let source = bytes_of(&device, &memory);
    for call in [c"cuMemcpyDtoHAsync", c"cuEventCreate", c"cuEventRecord"] {
        fake.fail(call);
        let error = fetch(vec![(source.clone(), target.as_mut_slice())], drop).expect_err("told");
        assert!(error.message().contains("CUDA_ERROR_UNKNOWN (999)"), "{error}");
        assert_eq!(fake.log().last().map(String::as_str), Some("settle 1"), "{call:?}");
    }
    let (first, second) = target.split_at_mut(50);
    let jobs = vec![(source.slice(0..50), first), (source.slice(50..100), second)];
    let outcome = fetch(jobs, |coming| {
        fake.fail(c"cuEventSynchronize");
        coming.into_iter().map(|coming| coming.wait().is_ok()).collect::<Vec<_>>()
    });
    assert_eq!(outcome.expect("submitted"), [false, false], "one moment, one answer");
    fake.fail(c"cuEventRecord");
    assert!(device.follow(0).is_err());
}

#[test]
fn memory_is_pinned_until_let_go() {
    let fake = Fake::build();
    let device = fake.device();
    let mut memory = vec![0u8; 8192];
    drop(device.pin(&mut memory).expect("pinned"));
    assert_eq!(fake.log(), ["register 8192", "unregister 0"]);
    fake.fail(c"cuMemHostRegister");
    let error = device.pin(&mut memory).expect_err("told");
    assert!(error.message().starts_with("cuMemHostRegister failed"), "{error}");
    assert_eq!(fake.retained(), 1);
    drop(device);
    assert_eq!(fake.retained(), 0, "the context is let go");
}

#[test]
fn a_missing_driver_or_device_is_told() {
    let fake = Fake::build();
    let error = Device::open_by(Path::new("/nowhere/libcuda.so.1"), 0).expect_err("no driver");
    assert!(
        error.kind() == forebay_core::ErrorKind::Unsupported && error.message().contains("no CUDA driver")
    );
    let error = Device::open_by(&fake.path, 7).expect_err("no such device");
    assert!(error.message().contains("cuDeviceGet failed: CUDA_ERROR_INVALID_DEVICE (101)"), "{error}");
}
