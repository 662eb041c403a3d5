"""Messages and words of Python, PyTorch, NCCL and the system that are kept in a bundle, because they tell causes apart.

{} stands for a value, which is kept if it is a number or a known word. A message that is not in this list is counted and left out.
"""

MESSAGES = (
    "Traceback (most recent call last):",
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
    # Memory.
    "CUDA out of memory. Tried to allocate {}. GPU {} has a total capacity of {} of which {} is free. {}",
    "CUDA out of memory. Tried to allocate {}",
    "DefaultCPUAllocator: can't allocate memory: you tried to allocate {} bytes. Error code {}",
    "[enforce fail at alloc_cpu.cpp:{}] {}. DefaultCPUAllocator: can't allocate memory: you tried to allocate {} bytes. Error code {}",
    "Unable to allocate {} for an array with shape {} and data type {}",
    "Out of memory: Killed process {}",
    # CUDA.
    "CUDA error: an illegal memory access was encountered{}",
    "CUDA error: device-side assert triggered{}",
    "CUDA error: uncorrectable ECC error encountered{}",
    "CUDA error: no kernel image is available for execution on the device{}",
    "CUDA error: the launch timed out and was terminated{}",
    "CUDA error: unspecified launch failure{}",
    "CUDA error: {}",
    "CUDA driver version is insufficient for CUDA runtime version",
    "No CUDA GPUs are available",
    "CUBLAS_STATUS_{}",
    "cuDNN error: {}",
    # Collectives.
    "Watchdog caught collective operation timeout: WorkNCCL(SeqNum={}, OpType={}, NumelIn={}, NumelOut={}, Timeout(ms)={}) ran for {}",
    "NCCL error in: {}, {}, NCCL version {}",
    "ncclUnhandledCudaError: {}", "ncclSystemError: {}", "ncclInternalError: {}", "ncclInvalidUsage: {}", "ncclRemoteError: {}",
    "Timed out waiting {}ms for recv operation to complete", "Timed out waiting {}ms for send operation to complete",
    "[{}] Timed out waiting {}ms for recv operation to complete", "[{}] Timed out waiting {}ms for send operation to complete",
    "[{}] Connection closed by peer [{}]:{}", "Connection closed by peer [{}]:{}", "[{}] Read error [{}]:{}: Connection reset by peer",
    "[{}] Application timeout caused pair closure", "Application timeout caused pair closure",
    "Broken pipe{}", "Connection reset by peer{}", "Connection refused{}",
    "The client socket has failed to connect to {}", "The client socket has timed out after {} while trying to connect to {}",
    "[c10d] The client socket has failed to connect to {} (errno: {} - {}).",
    "Default process group has not been initialized, please make sure to call init_process_group.",
    # Ends of processes.
    "Segmentation fault{}", "Bus error{}", "Killed{}", "Aborted{}", "Floating point exception{}",
    "Fatal Python error: Segmentation fault", "Fatal Python error: Aborted", "Fatal Python error: Bus error",
    "Sending process {} closing signal {}", "failed (exitcode: {}) local_rank: {} (pid: {}) of binary: {}",
    "Signal {} ({}) received by PID {}", "Received Signals.{} death signal, shutting down workers",
    "Process {} got signal: {}", "Root Cause (first observed failure):", "Other Failures:", "ChildFailedError:",
    "exitcode  : {} (pid: {})", "  exitcode  : {} (pid: {})", "  time      : {}", "  host      : {}", "  rank      : {} (local_rank: {})",
    "  traceback : Signal {} ({}) received by PID {}",
    "Setting OMP_NUM_THREADS environment variable for each process to be {} in default, to avoid your system being overloaded, please "
    "further tune the variable for optimal performance in your application as needed.",
    # Files.
    "Error while deserializing header: {}", "unexpected end of data", "Compressed file ended before {}",
    "PytorchStreamReader failed reading zip archive: {}", "Invalid magic number; corrupt file?",
    # Values and shapes.
    "mat1 and mat2 shapes cannot be multiplied ({} and {})", "mat1 and mat2 must have the same dtype, but got {} and {}",
    "The size of tensor a ({}) must match the size of tensor b ({}) at non-singleton dimension {}",
    "Expected all tensors to be on the same device, but found at least two devices, {} and {}!",
    "Expected tensor for argument {} to have {}", "Trying to backward through the graph a second time{}",
    "element 0 of tensors does not require grad and does not have a grad_fn", "index out of range in self",
    "Error(s) in loading state_dict for {}:", "size mismatch for {}: copying a param with shape {} from checkpoint, the shape in current "
    "model is {}.", "No module named {}", "cannot import name {} from {}", "list index out of range", "division by zero",
    "unsupported operand type(s) for {}: {} and {}", "object of type {} has no len()", "{} object has no attribute {}",
    "maximum recursion depth exceeded{}", "name {} is not defined", "not enough values to unpack (expected {}, got {})",
)  # fmt: skip

WORDS = (
    "", "expandable_segments", "max_split_size_mb", "garbage_collection_threshold", "roundup_power2_divisions", "backend",
    "cudaMallocAsync", "Ring", "Tree", "Simple", "LL", "LL128", "NVLS", "INFO", "WARN", "TRACE", "VERSION", "SYS", "NODE", "PXB", "PIX",
    "PHB", "LOC", "localhost", "127.0.0.1", "::1", "cpu", "cuda", "linux", "Linux", "x86_64", "aarch64", "CPython", "glibc", "musl",
    "ALLREDUCE", "ALLGATHER", "BROADCAST", "REDUCE_SCATTER", "_ALLGATHER_BASE", "_REDUCE_SCATTER_BASE", "ALLTOALL_BASE", "SEND", "RECV",
    "BARRIER", "COALESCED", "all_reduce", "all_gather", "broadcast", "reduce_scatter", "all_to_all", "barrier", "nccl", "gloo", "ucc",
    "mpi", "scheduled", "started", "completed", "SIGKILL", "SIGSEGV", "SIGTERM", "SIGABRT", "SIGBUS", "SIGINT", "SIGFPE", "SIGILL",
    "ext4", "xfs", "btrfs", "tmpfs", "overlay", "nfs", "nfs4", "lustre", "gpfs", "beegfs", "fuse", "zfs", "cifs", "ceph",
)  # fmt: skip
"""Words that the sources of lmworks do not have."""
