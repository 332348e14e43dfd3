//! The main function with LibTorch, for tests and device checks. It writes counts of requests to its device to a file, and
//! the device can be simulated. It is never installed. The installed program does not read these variables.
//!
//! | variable | meaning |
//! | --- | --- |
//! | `REMOE_TEST_DEVICE_BYTES` | memory of a simulated device, which computes on the CPU; without it, the machine's device is opened |
//! | `REMOE_TEST_RECORDING` | file for the [`DeviceRecording`] as JSON with the number of `writes`, rewritten every 20 ms |
//! | `REMOE_TEST_DEVICE_LIMIT` | once this file exists, the simulated device has the memory that it states |
//! | `REMOE_TEST_DEVICE_LOST` | once this file exists, the simulated device fails every operation |

use main_model_fn::{DeviceError, DeviceName};
use main_model_torch::TorchOn;
use main_model_torch::library::{DeviceOpener, DeviceRecording, InstalledDevices, TorchDevice};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
use std::{env, fs, io, thread};

/// Time between two writes of the recording.
const PERIOD: Duration = Duration::from_millis(20);

/// Opens the device that the variables describe.
struct RecordedDevice;

impl DeviceOpener for RecordedDevice {
    fn open(name: Option<DeviceName>) -> Result<Arc<TorchDevice>, DeviceError> {
        let bytes = env::var("REMOE_TEST_DEVICE_BYTES").ok().and_then(|bytes| bytes.parse().ok());
        let device = match bytes {
            Some(bytes) => TorchDevice::simulated(bytes),
            None => InstalledDevices::open(name)?,
        };
        let file = |variable: &str| env::var_os(variable).map(PathBuf::from);
        let files = ControlFiles {
            recording: file("REMOE_TEST_RECORDING"),
            limit: file("REMOE_TEST_DEVICE_LIMIT"),
            lost: file("REMOE_TEST_DEVICE_LOST"),
        };
        let shared = device.clone();
        // The thread ends with the process.
        thread::spawn(move || follow_files(&shared, &files));
        Ok(device)
    }
}

/// Files by which a test reads and controls the device.
struct ControlFiles {
    recording: Option<PathBuf>,
    limit: Option<PathBuf>,
    lost: Option<PathBuf>,
}

/// Writes the recording and applies limit and loss, for ever.
fn follow_files(device: &TorchDevice, ControlFiles { recording, limit, lost }: &ControlFiles) {
    let mut writes = 0;
    loop {
        let limit = limit.as_ref().and_then(|file| fs::read_to_string(file).ok());
        if let Some(bytes) = limit.and_then(|text| text.trim().parse().ok()) {
            device.set_memory_limit(bytes);
        }
        if lost.as_ref().is_some_and(|file| file.exists()) {
            device.simulate_loss();
        }
        if let Some(file) = recording {
            writes += 1;
            if let Err(error) = write_recording(file, &device.recording(), writes) {
                eprintln!("cannot write {}: {error}", file.display());
            }
        }
        thread::sleep(PERIOD);
    }
}

/// Replaces `file` as a whole: readers see the old or the new recording.
fn write_recording(file: &PathBuf, recording: &DeviceRecording, writes: u64) -> io::Result<()> {
    let new_file = file.with_extension("new");
    let mut text = serde_json::to_value(recording)?;
    text["writes"] = writes.into();
    fs::write(&new_file, serde_json::to_vec(&text)?)?;
    fs::rename(new_file, file)
}

fn main() -> ExitCode {
    main_model_fn::main::<TorchOn<RecordedDevice>>()
}
