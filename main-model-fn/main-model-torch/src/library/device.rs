//! Devices: CUDA's, the CPU, and a CPU that is treated as a device, for tests.

use super::recording::{Counts, Recorder, Recording};
use super::staging::Staging;
use main_model_fn::backend::BackendError;
use main_model_fn::{DeviceError, DeviceName};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tch::{Cuda, TchError};

/// Decides which device a program opens.
///
/// The programs that are installed use [`Installed`]. Tests implement it themselves, to open a
/// [simulated device](Device::simulated) and to keep a handle to it; no flag or variable leads there.
pub trait Driver: Send + Sync + 'static {
    /// Opens the device `name`, or the best one.
    ///
    /// # Errors
    /// The device is not there.
    fn open(name: Option<DeviceName>) -> Result<Arc<TorchDevice>, DeviceError>;
}

/// The machine's devices.
pub struct Installed;

impl Driver for Installed {
    fn open(name: Option<DeviceName>) -> Result<Arc<TorchDevice>, DeviceError> {
        TorchDevice::installed(name).map(Arc::new)
    }
}

/// A device and its counters.
#[derive(Debug)]
pub struct TorchDevice {
    name: DeviceName,
    pub(super) device: tch::Device,
    recorder: Mutex<Recorder>,
    pub(super) staging: Mutex<Staging>,
    /// Set if a simulated device fails from now on.
    lost: AtomicBool,
}

impl TorchDevice {
    fn new(name: DeviceName, device: tch::Device, limit_bytes: Option<u64>) -> Self {
        let recorder = Mutex::new(Recorder::new(limit_bytes));
        Self { name, device, recorder, staging: Mutex::default(), lost: AtomicBool::new(false) }
    }

    fn installed(name: Option<DeviceName>) -> Result<Self, DeviceError> {
        let best = || if Cuda::is_available() { DeviceName::Cuda(0) } else { DeviceName::Cpu };
        let name = name.unwrap_or_else(best);
        let DeviceName::Cuda(index) = name else { return Ok(Self::new(name, tch::Device::Cpu, None)) };
        let found = if Cuda::is_available() { Cuda::device_count() } else { 0 };
        let found = usize::try_from(found).unwrap_or(0);
        if index >= found {
            return Err(DeviceError::Missing { index, found });
        }
        Ok(Self::new(name, tch::Device::Cuda(index), None))
    }

    /// A device with `bytes` of memory that computes on the CPU, for tests: everything above takes the branches that
    /// it takes on `cuda:0`.
    #[must_use]
    pub fn simulated(bytes: u64) -> Arc<Self> {
        Arc::new(Self::new(DeviceName::Cuda(0), tch::Device::Cpu, Some(bytes)))
    }

    /// Lets every further operation fail as on a device whose context is lost, for tests.
    pub fn lose(&self) {
        self.lost.store(true, Ordering::Relaxed);
    }

    /// Changes the memory of a simulated device, for tests: as other processes do that use the same device.
    pub fn limit(&self, bytes: u64) {
        self.recorder().limit(bytes);
    }

    /// Sets `peak_bytes` of the recording to what is held, and `largest_bytes` to 0, for tests.
    pub fn reset_peaks(&self) {
        self.recorder().reset_peaks();
    }

    /// Returns its counters.
    #[must_use]
    pub fn recording(&self) -> Recording {
        self.recorder().recording()
    }

    pub(crate) fn name(&self) -> DeviceName {
        self.name
    }

    /// Returns LibTorch's unused memory to CUDA: its allocator does so before it refuses a request. tch has no call for it.
    pub(crate) fn release_unused(&self) {
        if self.device.is_cuda() {
            let _refused = tch::Tensor::f_empty([1_i64 << 50], (tch::Kind::Uint8, self.device));
        }
    }

    /// Returns the memory that CUDA's libraries take outside of LibTorch's allocator with their first calls, in bytes.
    pub(crate) fn library_bytes(&self) -> i64 {
        if self.device.is_cuda() { 512 << 20 } else { 0 }
    }

    /// Reports if weights stay with the kernels on the host.
    pub(crate) fn is_host(&self) -> bool {
        self.name == DeviceName::Cpu
    }

    /// Counts what follows for `layer`.
    pub(crate) fn enter(&self, layer: Option<usize>) {
        self.recorder().enter(layer);
    }

    pub(super) fn recorder(&self) -> MutexGuard<'_, Recorder> {
        self.recorder.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn count(&self, count: impl FnOnce(&mut Counts)) {
        count(self.recorder().counts());
    }

    /// Takes `bytes` for a tensor.
    pub(super) fn take(&self, bytes: usize) -> Result<(), BackendError> {
        let taken = self.recorder().take(bytes as u64);
        taken.map_err(|free| BackendError::OutOfMemory {
            message: format!("{bytes} bytes requested, {free} bytes free on the simulated device"),
        })
    }

    pub(super) fn give_back(&self, bytes: usize) {
        self.recorder().give_back(bytes as u64);
    }

    /// Passes on the outcome of a call.
    pub(super) fn outcome<T>(&self, outcome: Result<T, TchError>) -> Result<T, BackendError> {
        if self.lost.load(Ordering::Relaxed) {
            return Err(BackendError::DeviceLost { message: "the simulated device is lost".to_owned() });
        }
        outcome.map_err(|error| failure(&error))
    }
}

/// Tells errors of memory and of the device from those of this program, by LibTorch's messages: it has no codes.
fn failure(error: &TchError) -> BackendError {
    let whole = error.to_string();
    // What follows is LibTorch's stack.
    let message = whole.lines().next().unwrap_or_default().to_owned();
    let has = |signs: &[&str]| signs.iter().any(|sign| whole.contains(sign));
    if has(&[
        "out of memory",
        "not enough memory",
        "can't allocate memory",
        "CUBLAS_STATUS_ALLOC_FAILED",
        // Its handle found no memory.
        "CUBLAS_STATUS_NOT_INITIALIZED",
    ]) {
        BackendError::OutOfMemory { message }
    } else if has(&["no kernel image", "invalid configuration argument", "_STATUS_NOT_SUPPORTED"]) {
        // The device is well; this build or this call does not suit it.
        BackendError::Library { library: "LibTorch", message }
    } else if has(&["CUDA error", "CUDA driver error", "CUBLAS_STATUS_", "CUDNN_STATUS_"]) {
        BackendError::DeviceLost { message }
    } else {
        BackendError::Library { library: "LibTorch", message }
    }
}

/// LibTorch uses so many threads on the CPU.
pub(crate) fn set_threads(threads: usize) {
    tch::set_num_threads(i32::try_from(threads).unwrap_or(i32::MAX));
}

/// LibTorch records nothing for gradients on this thread, as long as it lives.
pub(crate) fn forbid_gradients() {
    #[expect(clippy::disallowed_methods, reason = "the guard lives as long as the thread")]
    std::mem::forget(tch::no_grad_guard());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_told_apart_by_message() {
        let of = |message: &str| failure(&TchError::Torch(message.to_owned()));
        let memory =
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 79 GiB\nException raised from malloc";
        match of(memory) {
            BackendError::OutOfMemory { message } => assert!(!message.contains("raised"), "{message}"),
            other => assert!(matches!(other, BackendError::OutOfMemory { .. }), "{other}"),
        }
        for lost in [
            "CUDA error: an illegal memory access was encountered",
            "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`",
        ] {
            assert!(matches!(of(lost), BackendError::DeviceLost { .. }), "{lost}");
        }
        for memory in ["CUDA error: out of memory", "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling"]
        {
            assert!(matches!(of(memory), BackendError::OutOfMemory { .. }), "{memory}");
        }
        let build = of("CUDA error: no kernel image is available for execution on the device");
        assert!(matches!(build, BackendError::Library { .. }), "{build}");
        let own = of("The size of tensor a (3) must match the size of tensor b (4)");
        assert!(matches!(own, BackendError::Library { .. }), "{own}");
    }
}
