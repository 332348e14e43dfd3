//! The main function with LibTorch, for tests and device checks: what its device is asked for is written to a file, and
//! the device can be a simulated one. It is never installed; the program of users has none of these variables.
//!
//! | variable | meaning |
//! | --- | --- |
//! | `REMOE_TEST_DEVICE_BYTES` | simulate a device of so many bytes, which computes on the CPU; else the machine's |
//! | `REMOE_TEST_RECORDING` | file for the device's [`Recording`](main_model_torch::library::Recording) as JSON, with the number of `writes`: rewritten again and again |
//! | `REMOE_TEST_DEVICE_LIMIT` | once this file exists, the simulated device has as many bytes as it says |
//! | `REMOE_TEST_DEVICE_LOST` | once this file exists, the simulated device fails every operation |

use main_model_fn::{DeviceError, DeviceName};
use main_model_torch::TorchOn;
use main_model_torch::library::{Driver, Installed, Recording, TorchDevice};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
use std::{env, fs, io, thread};

/// Between two looks at the counters and for the file.
const PERIOD: Duration = Duration::from_millis(20);

/// Opens the device that the variables describe.
struct Recorded;

impl Driver for Recorded {
    fn open(name: Option<DeviceName>) -> Result<Arc<TorchDevice>, DeviceError> {
        let bytes = env::var("REMOE_TEST_DEVICE_BYTES").ok().and_then(|bytes| bytes.parse().ok());
        let device = match bytes {
            Some(bytes) => TorchDevice::simulated(bytes),
            None => Installed::open(name)?,
        };
        let file = |variable: &str| env::var_os(variable).map(PathBuf::from);
        let files = Files {
            recording: file("REMOE_TEST_RECORDING"),
            limit: file("REMOE_TEST_DEVICE_LIMIT"),
            lost: file("REMOE_TEST_DEVICE_LOST"),
        };
        let watched = device.clone();
        // Ends with the process.
        thread::spawn(move || watch(&watched, &files));
        Ok(device)
    }
}

struct Files {
    recording: Option<PathBuf>,
    limit: Option<PathBuf>,
    lost: Option<PathBuf>,
}

fn watch(device: &TorchDevice, Files { recording, limit, lost }: &Files) {
    let mut writes = 0;
    loop {
        let limit = limit.as_ref().and_then(|file| fs::read_to_string(file).ok());
        if let Some(bytes) = limit.and_then(|text| text.trim().parse().ok()) {
            device.limit(bytes);
        }
        if lost.as_ref().is_some_and(|file| file.exists()) {
            device.lose();
        }
        if let Some(file) = recording {
            writes += 1;
            if let Err(error) = write(file, &device.recording(), writes) {
                eprintln!("cannot write {}: {error}", file.display());
            }
        }
        thread::sleep(PERIOD);
    }
}

/// Readers see the old file or the new one.
fn write(file: &PathBuf, recording: &Recording, writes: u64) -> io::Result<()> {
    let whole = file.with_extension("new");
    let mut text = serde_json::to_value(recording)?;
    text["writes"] = writes.into();
    fs::write(&whole, serde_json::to_vec(&text)?)?;
    fs::rename(whole, file)
}

fn main() -> ExitCode {
    main_model_fn::main::<TorchOn<Recorded>>()
}
