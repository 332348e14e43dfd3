//! Devices: GPUs, the CPU, and for tests a simulated GPU that computes on the CPU.

use super::recording::{DeviceCounts, DeviceRecording, Recorder};
use super::staging::Staging;
use main_model_fn::backend::BackendError;
use main_model_fn::{DeviceError, DeviceName};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tch::{Cuda, TchError};

/// Opens the device of a program.
///
/// Installed programs use [`InstalledDevices`]. Tests implement it to open a [simulated device](TorchDevice::simulated) and
/// to keep a handle to it. Installed programs have no flag or variable for that.
pub trait DeviceOpener: Send + Sync + 'static {
    /// Opens the device `name`, by default the first GPU or else the CPU.
    ///
    /// # Errors
    /// The machine has no such device.
    fn open(name: Option<DeviceName>) -> Result<Arc<TorchDevice>, DeviceError>;
}

/// Devices of the machine.
pub struct InstalledDevices;

impl DeviceOpener for InstalledDevices {
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
    /// Set if all further operations of a simulated device fail.
    is_lost: AtomicBool,
}

impl TorchDevice {
    fn new(name: DeviceName, device: tch::Device, limit_bytes: Option<u64>) -> Self {
        let recorder = Mutex::new(Recorder::new(limit_bytes));
        Self { name, device, recorder, staging: Mutex::default(), is_lost: AtomicBool::new(false) }
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

    /// Returns a device with `bytes` of memory that computes on the CPU, for tests. Modules above this one treat it as
    /// `cuda:0`.
    #[must_use]
    pub fn simulated(bytes: u64) -> Arc<Self> {
        Arc::new(Self::new(DeviceName::Cuda(0), tch::Device::Cpu, Some(bytes)))
    }

    /// Makes every further operation fail as on a device with a lost context, for tests.
    pub fn simulate_loss(&self) {
        self.is_lost.store(true, Ordering::Relaxed);
    }

    /// Changes the memory of a simulated device, for tests, like other processes on the same device.
    pub fn set_memory_limit(&self, bytes: u64) {
        self.recorder().set_limit(bytes);
    }

    /// Sets `peak_bytes` of the recording to `held_bytes`, and `largest_bytes` to 0, for tests.
    pub fn reset_peaks(&self) {
        self.recorder().reset_peaks();
    }

    /// Returns a copy of the counters.
    #[must_use]
    pub fn recording(&self) -> DeviceRecording {
        self.recorder().recording()
    }

    pub(crate) fn name(&self) -> DeviceName {
        self.name
    }

    /// Returns LibTorch's cached memory to CUDA. tch has no call for it, but LibTorch's allocator does so before it refuses
    /// a request.
    pub(crate) fn release_unused(&self) {
        if self.device.is_cuda() {
            let _out_of_memory = tch::Tensor::f_empty([1_i64 << 50], (tch::Kind::Uint8, self.device));
        }
    }

    /// Returns the bytes of device memory that CUDA's libraries allocate at their first calls, outside of LibTorch's
    /// allocator.
    pub(crate) fn library_bytes(&self) -> i64 {
        if self.device.is_cuda() { 512 << 20 } else { 0 }
    }

    /// True if the kernels compute on the host, and weights stay there.
    pub(crate) fn is_host(&self) -> bool {
        self.name == DeviceName::Cpu
    }

    /// Counts further operations for `layer`, or outside of layers.
    pub(crate) fn set_layer(&self, layer: Option<usize>) {
        self.recorder().set_layer(layer);
    }

    pub(super) fn recorder(&self) -> MutexGuard<'_, Recorder> {
        self.recorder.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn count(&self, count: impl FnOnce(&mut DeviceCounts)) {
        count(self.recorder().counts());
    }

    /// Counts `bytes` of a tensor.
    ///
    /// # Errors
    /// A simulated device has less memory left.
    pub(super) fn allocate(&self, bytes: usize) -> Result<(), BackendError> {
        let allocated = self.recorder().allocate(bytes as u64);
        allocated.map_err(|free| BackendError::OutOfMemory {
            message: format!("{bytes} bytes requested, {free} bytes free on the simulated device"),
        })
    }

    pub(super) fn free(&self, bytes: usize) {
        self.recorder().free(bytes as u64);
    }

    /// Returns the result of a LibTorch call with its error classified.
    pub(super) fn checked<T>(&self, result: Result<T, TchError>) -> Result<T, BackendError> {
        if self.is_lost.load(Ordering::Relaxed) {
            return Err(BackendError::DeviceLost { message: "the simulated device is lost".to_owned() });
        }
        result.map_err(|error| classified(&error))
    }
}

/// Classifies an error by LibTorch's message, as it has no codes: out of memory, lost device, or another one.
fn classified(error: &TchError) -> BackendError {
    let text = error.to_string();
    // Further lines are LibTorch's stack.
    let message = text.lines().next().unwrap_or_default().to_owned();
    let contains = |patterns: &[&str]| patterns.iter().any(|pattern| text.contains(pattern));
    if contains(&[
        "out of memory",
        "not enough memory",
        "can't allocate memory",
        "CUBLAS_STATUS_ALLOC_FAILED",
        // No memory for a cuBLAS handle.
        "CUBLAS_STATUS_NOT_INITIALIZED",
    ]) {
        BackendError::OutOfMemory { message }
    } else if contains(&["no kernel image", "invalid configuration argument", "_STATUS_NOT_SUPPORTED"]) {
        // The device works; this build or this call does not support it.
        BackendError::Library { library: "LibTorch", message }
    } else if contains(&["CUDA error", "CUDA driver error", "CUBLAS_STATUS_", "CUDNN_STATUS_"]) {
        BackendError::DeviceLost { message }
    } else {
        BackendError::Library { library: "LibTorch", message }
    }
}

/// Sets the number of threads that LibTorch uses on the CPU.
pub(crate) fn set_threads(threads: usize) {
    tch::set_num_threads(i32::try_from(threads).unwrap_or(i32::MAX));
}

/// Switches gradients off for this thread until it ends.
pub(crate) fn forbid_gradients() {
    #[expect(clippy::disallowed_methods, reason = "the guard lives as long as the thread")]
    std::mem::forget(tch::no_grad_guard());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_classified_by_message() {
        let error = |message: &str| classified(&TchError::Torch(message.to_owned()));
        let memory =
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 79 GiB\nException raised from malloc";
        match error(memory) {
            BackendError::OutOfMemory { message } => assert!(!message.contains("raised"), "{message}"),
            other => assert!(matches!(other, BackendError::OutOfMemory { .. }), "{other}"),
        }
        for lost in [
            "CUDA error: an illegal memory access was encountered",
            "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`",
        ] {
            assert!(matches!(error(lost), BackendError::DeviceLost { .. }), "{lost}");
        }
        for memory in ["CUDA error: out of memory", "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling"]
        {
            assert!(matches!(error(memory), BackendError::OutOfMemory { .. }), "{memory}");
        }
        let build_error = error("CUDA error: no kernel image is available for execution on the device");
        assert!(matches!(build_error, BackendError::Library { .. }), "{build_error}");
        let size_error = error("The size of tensor a (3) must match the size of tensor b (4)");
        assert!(matches!(size_error, BackendError::Library { .. }), "{size_error}");
    }
}
