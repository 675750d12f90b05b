//! Batched matrix products by cuBLASLt: descriptors, the choice of an algorithm (once per problem), and the call.
//! Products accumulate in f32 for f32 and narrower dtypes, and in f64 for f64; operands of f32 are rounded to TF32 only if
//! [`MatmulPrecision`] allows it.

use super::driver::Stream;
use super::library::{CUBLASLT, Library, SearchPaths, StatusCode, foreign};
use super::operand::Operand;
use crate::buffer::Buffer;
use crate::dtype::DType;
use crate::error::KernelError;
use crate::precision::MatmulPrecision;
use cudarc::cublaslt::sys::{
    cublasComputeType_t, cublasLtEpilogue_t, cublasLtHandle_t, cublasLtMatmulAlgo_t, cublasLtMatmulDesc_t,
    cublasLtMatmulDescAttributes_t, cublasLtMatmulHeuristicResult_t, cublasLtMatmulPreference_t,
    cublasLtMatmulPreferenceAttributes_t, cublasLtMatrixLayout_t, cublasLtMatrixLayoutAttribute_t,
    cudaDataType, cudaStream_t,
};
use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::Arc;

foreign!(Table {}, CUBLASLT, cudarc::cublaslt::sys, cublasStatus_t {
    fn cublasLtCreate(handle: *mut cublasLtHandle_t);
    fn cublasLtDestroy(handle: cublasLtHandle_t);
    fn cublasLtMatmulDescCreate(product: *mut cublasLtMatmulDesc_t, compute: cublasComputeType_t, scale: cudaDataType);
    fn cublasLtMatmulDescDestroy(product: cublasLtMatmulDesc_t);
    fn cublasLtMatmulDescSetAttribute(product: cublasLtMatmulDesc_t, which: cublasLtMatmulDescAttributes_t,
        value: *const c_void, bytes: usize);
    fn cublasLtMatrixLayoutCreate(layout: *mut cublasLtMatrixLayout_t, dtype: cudaDataType, rows: u64, columns: u64,
        lead: i64);
    fn cublasLtMatrixLayoutDestroy(layout: cublasLtMatrixLayout_t);
    fn cublasLtMatrixLayoutSetAttribute(layout: cublasLtMatrixLayout_t, which: cublasLtMatrixLayoutAttribute_t,
        value: *const c_void, bytes: usize);
    fn cublasLtMatmulPreferenceCreate(preference: *mut cublasLtMatmulPreference_t);
    fn cublasLtMatmulPreferenceDestroy(preference: cublasLtMatmulPreference_t);
    fn cublasLtMatmulPreferenceSetAttribute(preference: cublasLtMatmulPreference_t,
        which: cublasLtMatmulPreferenceAttributes_t, value: *const c_void, bytes: usize);
    fn cublasLtMatmulAlgoGetHeuristic(handle: cublasLtHandle_t, product: cublasLtMatmulDesc_t, a: cublasLtMatrixLayout_t,
        b: cublasLtMatrixLayout_t, c: cublasLtMatrixLayout_t, d: cublasLtMatrixLayout_t,
        preference: cublasLtMatmulPreference_t, asked: c_int, results: *mut cublasLtMatmulHeuristicResult_t,
        found: *mut c_int);
    fn cublasLtMatmul(handle: cublasLtHandle_t, product: cublasLtMatmulDesc_t, alpha: *const c_void, a: *const c_void,
        a_layout: cublasLtMatrixLayout_t, b: *const c_void, b_layout: cublasLtMatrixLayout_t, beta: *const c_void,
        c: *const c_void, c_layout: cublasLtMatrixLayout_t, d: *mut c_void, d_layout: cublasLtMatrixLayout_t,
        algorithm: *const cublasLtMatmulAlgo_t, workspace: *mut c_void, workspace_bytes: usize, stream: cudaStream_t);
});

/// `CUBLAS_STATUS_NOT_SUPPORTED`.
const NOT_SUPPORTED: StatusCode = 15;

impl Table {
    fn failed(&self, call: &'static str, status: StatusCode) -> KernelError {
        if status == NOT_SUPPORTED {
            return KernelError::Unsupported { kernel: call, device: "cuBLASLt" };
        }
        KernelError::Device { call, why: format!("cuBLASLt returned status {status}"), lost_gpu: None }
    }
}

/// A batched product that cuBLASLt can express: c = epilogue(a b + residual), with a (g, m, k), b (g, k, n) and c (g, m, n). Plans
/// are cached by this key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct MatmulProblem {
    pub(super) dtype: DType,
    pub(super) extents: [usize; 4],
    pub(super) a: Operand,
    pub(super) b: Operand,
    pub(super) c: Operand,
    /// The matrix added to the product, with the memory order of c (the C operand of cuBLASLt; ours is its D).
    pub(super) residual: Option<Operand>,
    /// The epilogue. All but the default require a row-major c, whose rows are the columns of cuBLASLt: a bias is added along them.
    pub(super) epilogue: cublasLtEpilogue_t,
}

/// The addresses of the operands of an epilogue; 0 for missing ones.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct EpilogueOperands {
    /// A vector (n): the bias that is read, or the bias gradient that is written.
    pub(super) bias: u64,
    /// A row-major matrix like c: the input of gelu, which is written.
    pub(super) aux: u64,
    /// The matrix that is added to the product.
    pub(super) residual: u64,
}

impl MatmulProblem {
    /// Returns the problem with a column-major c, and whether a and b are exchanged: c^T = b^T a^T.
    fn column_major(self) -> (MatmulProblem, bool) {
        if !self.c.transposed {
            return (self, false);
        }
        let [g, m, n, k] = self.extents;
        let (a, b, c) = (self.b.transposed(), self.a.transposed(), self.c.transposed());
        (
            MatmulProblem {
                extents: [g, n, m, k],
                a,
                b,
                c,
                residual: self.residual.map(Operand::transposed),
                ..self
            },
            true,
        )
    }
}

/// The cuBLASLt library and a handle of it.
#[derive(Debug)]
pub(super) struct CublasLt {
    table: Table,
    handle: usize,
}

impl CublasLt {
    /// Finds the library and reads its version.
    fn find(paths: &SearchPaths) -> Result<(Library, usize), KernelError> {
        let library = paths.open(&CUBLASLT)?;
        // SAFETY: the bindings state this type; it takes nothing.
        let version = unsafe {
            let ask: unsafe extern "C" fn() -> usize = library.function(&CUBLASLT, "cublasLtGetVersion")?;
            ask()
        };
        CUBLASLT.check(version, &shown(version), library.file())?;
        Ok((library, version))
    }

    /// Returns the file that would be opened, and its version.
    pub(super) fn describe(paths: &SearchPaths) -> Result<String, KernelError> {
        let (library, version) = CublasLt::find(paths)?;
        Ok(format!("{} ({})", library.file().display(), shown(version)))
    }

    /// Opens the library. A context must be current on this thread.
    pub(super) fn open(paths: &SearchPaths) -> Result<Arc<CublasLt>, KernelError> {
        let (library, _) = CublasLt::find(paths)?;
        let table = Table::load(Arc::new(library))?;
        let mut handle = ptr::null_mut();
        // SAFETY: the place outlives the call; destroyed once, when this is dropped.
        unsafe { table.cublasLtCreate(&mut handle) }?;
        Ok(Arc::new(CublasLt { table, handle: handle.expose_provenance() }))
    }

    fn handle(&self) -> cublasLtHandle_t {
        ptr::with_exposed_provenance_mut(self.handle)
    }
}

impl Drop for CublasLt {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once.
        let _ = unsafe { self.table.cublasLtDestroy(self.handle()) };
    }
}

fn shown(version: usize) -> String {
    format!("{}.{}", version / 10_000, version % 10_000 / 100)
}

/// Descriptors and algorithm of a problem; only the pointers of its epilogue change between calls.
#[derive(Debug)]
struct MatmulPlan {
    library: Arc<CublasLt>,
    desc: usize,
    a: usize,
    b: usize,
    c: usize,
    /// The layout of c if there is no residual.
    residual: usize,
    algorithm: cublasLtMatmulAlgo_t,
}

/// The products of one stream: plans, cached by problem.
#[derive(Debug)]
pub(super) struct MatmulPlanner {
    library: Arc<CublasLt>,
    precision: MatmulPrecision,
    /// `None` if cuBLASLt has no algorithm for the problem.
    plans: HashMap<MatmulProblem, Option<MatmulPlan>>,
}

/// The workspace of a rank, in bytes, which limits the choice of algorithms.
pub(super) const WORKSPACE_BYTES: usize = 32 << 20;

/// The allowed split-k reductions: none, or in the compute type (`CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE`), whose order is fixed.
const REDUCTIONS: u32 = 2;

impl MatmulPlanner {
    /// Creates a planner; `precision` applies to products of f32.
    pub(super) fn new(library: &Arc<CublasLt>, precision: MatmulPrecision) -> MatmulPlanner {
        MatmulPlanner { library: library.clone(), precision, plans: HashMap::new() }
    }

    /// Returns the library.
    pub(super) fn library(&self) -> &Arc<CublasLt> {
        &self.library
    }

    /// Submits a product to a stream. Takes the addresses of a, b, c and of the epilogue operands, and a workspace that only this
    /// stream uses.
    ///
    /// # Errors
    /// [`KernelError::Unsupported`] if cuBLASLt has no algorithm; nothing was submitted then.
    pub(super) fn run(
        &mut self,
        stream: &Stream,
        problem: MatmulProblem,
        ([a, b, c], epilogue_operands): ([u64; 3], EpilogueOperands),
        workspace: &Buffer,
    ) -> Result<(), KernelError> {
        stream.context().bound()?;
        let (problem, swapped) = problem.column_major();
        let (a, b) = if swapped { (b, a) } else { (a, b) };
        if !self.plans.contains_key(&problem) {
            let plan = match MatmulPlan::new(&self.library, &problem, epilogue_operands, self.precision) {
                Err(KernelError::Unsupported { .. }) => None,
                plan => Some(plan?),
            };
            self.plans.insert(problem, plan);
        }
        let Some(plan) = &self.plans[&problem] else {
            return Err(KernelError::Unsupported { kernel: "cublasLtMatmul", device: "cuBLASLt" });
        };
        plan.point(&problem, epilogue_operands)?;
        // alpha and beta are f64 for f64, else f32; a zero has the same bytes in both.
        let (one, zero) = (1f64, 0f64);
        let (narrow_one, is_wide) = (1f32, problem.dtype == DType::F64);
        let alpha: *const c_void =
            if is_wide { (&raw const one).cast() } else { (&raw const narrow_one).cast() };
        let (beta, residual) = match problem.residual {
            Some(_) => (alpha, epilogue_operands.residual),
            None => ((&raw const zero).cast(), c),
        };
        let at = |address: u64| ptr::with_exposed_provenance_mut::<c_void>(address as usize);
        let layout = |handle: usize| -> cublasLtMatrixLayout_t { ptr::with_exposed_provenance_mut(handle) };
        // SAFETY: the descriptors are alive and describe the operands; alpha and beta outlive the call, which reads them on
        // the host. The views of the operands were checked against their buffers, whose memory returns to an allocator of this
        // stream.
        unsafe {
            self.library.table.cublasLtMatmul(
                self.library.handle(),
                ptr::with_exposed_provenance_mut(plan.desc),
                alpha,
                at(a),
                layout(plan.a),
                at(b),
                layout(plan.b),
                beta,
                at(residual),
                layout(plan.residual),
                at(c),
                layout(plan.c),
                &plan.algorithm,
                at(workspace.device_address().expect("the workspace is device memory")),
                workspace.bytes(),
                stream.handle().cast(),
            )
        }
    }
}

fn data_type(
    dtype: DType,
    precision: MatmulPrecision,
) -> Result<(cublasComputeType_t, cudaDataType, cudaDataType), KernelError> {
    use cublasComputeType_t::{
        CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_32F_FAST_16BF, CUBLAS_COMPUTE_32F_FAST_TF32, CUBLAS_COMPUTE_64F,
    };
    let single = match precision {
        MatmulPrecision::Highest => CUBLAS_COMPUTE_32F,
        MatmulPrecision::High => CUBLAS_COMPUTE_32F_FAST_TF32,
        MatmulPrecision::Medium => CUBLAS_COMPUTE_32F_FAST_16BF,
    };
    use cudaDataType as T;
    Ok(match dtype {
        DType::F64 => (CUBLAS_COMPUTE_64F, T::CUDA_R_64F, T::CUDA_R_64F),
        DType::F32 => (single, T::CUDA_R_32F, T::CUDA_R_32F),
        DType::BF16 => (CUBLAS_COMPUTE_32F, T::CUDA_R_32F, T::CUDA_R_16BF),
        DType::F16 => (CUBLAS_COMPUTE_32F, T::CUDA_R_32F, T::CUDA_R_16F),
        DType::I64 | DType::U8 | DType::Bool => return Err(KernelError::DType { kernel: "contract", dtype }),
    })
}

impl MatmulPlan {
    fn new(
        library: &Arc<CublasLt>,
        problem: &MatmulProblem,
        epilogue_operands: EpilogueOperands,
        precision: MatmulPrecision,
    ) -> Result<MatmulPlan, KernelError> {
        use cublasLtMatmulDescAttributes_t as D;
        let table = &library.table;
        let (compute, scale, dtype) = data_type(problem.dtype, precision)?;
        let [g, m, n, k] = problem.extents;
        // Each handle is stored at once, so that it is destroyed even if a later call fails.
        let mut plan = MatmulPlan {
            library: library.clone(),
            desc: 0,
            a: 0,
            b: 0,
            c: 0,
            residual: 0,
            algorithm: cublasLtMatmulAlgo_t { data: [0; 8] },
        };
        let mut desc = ptr::null_mut();
        // SAFETY: the place outlives the call; destroyed once, with the plan.
        unsafe { table.cublasLtMatmulDescCreate(&mut desc, compute, scale) }?;
        plan.desc = desc.expose_provenance();
        plan.set(D::CUBLASLT_MATMUL_DESC_TRANSA, &i32::from(problem.a.transposed))?;
        plan.set(D::CUBLASLT_MATMUL_DESC_TRANSB, &i32::from(problem.b.transposed))?;
        plan.set(D::CUBLASLT_MATMUL_DESC_EPILOGUE, &(problem.epilogue as u32))?;
        plan.point(problem, epilogue_operands)?;
        plan.a = layout(table, dtype, [g, m, k], problem.a)?;
        plan.b = layout(table, dtype, [g, k, n], problem.b)?;
        plan.c = layout(table, dtype, [g, m, n], problem.c)?;
        plan.residual = match problem.residual {
            Some(residual) => layout(table, dtype, [g, m, n], residual)?,
            None => plan.c,
        };
        plan.algorithm = plan.choose(problem)?;
        Ok(plan)
    }

    /// Sets an attribute of the descriptor.
    fn set<T>(&self, which: cublasLtMatmulDescAttributes_t, value: &T) -> Result<(), KernelError> {
        let desc = ptr::with_exposed_provenance_mut(self.desc);
        // SAFETY: the stated size is that of the value, and the library compares it with the attribute's; the descriptor is
        // alive.
        unsafe {
            self.library.table.cublasLtMatmulDescSetAttribute(
                desc,
                which,
                ptr::from_ref(value).cast(),
                size_of::<T>(),
            )
        }
    }

    /// Sets the pointers of the epilogue operands.
    fn point(&self, problem: &MatmulProblem, epilogue_operands: EpilogueOperands) -> Result<(), KernelError> {
        use cublasLtMatmulDescAttributes_t as D;
        if epilogue_operands.bias != 0 {
            self.set(D::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &epilogue_operands.bias)?;
        }
        if epilogue_operands.aux != 0 {
            self.set(D::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &epilogue_operands.aux)?;
            self.set(D::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &(problem.c.leading_dim as i64))?;
            let step = problem.c.batch_stride as i64;
            self.set(D::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE, &step)?;
        }
        Ok(())
    }

    /// Returns the first choice of cuBLASLt's heuristic among algorithms that fit workspace and alignments and sum in a fixed order.
    fn choose(&self, problem: &MatmulProblem) -> Result<cublasLtMatmulAlgo_t, KernelError> {
        use cublasLtMatmulPreferenceAttributes_t as P;
        let table = &self.library.table;
        let preference = Preference::new(table)?;
        preference.set(P::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &(WORKSPACE_BYTES as u64))?;
        preference.set(P::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &REDUCTIONS)?;
        preference.set(P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &problem.a.alignment)?;
        preference.set(P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &problem.b.alignment)?;
        let residual = problem.residual.unwrap_or(problem.c);
        preference.set(P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &residual.alignment)?;
        preference.set(P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &problem.c.alignment)?;
        let mut result = MaybeUninit::<cublasLtMatmulHeuristicResult_t>::zeroed();
        let mut found = 0;
        let layout = |handle: usize| -> cublasLtMatrixLayout_t { ptr::with_exposed_provenance_mut(handle) };
        // SAFETY: all descriptors are alive; there is room for the one requested result.
        unsafe {
            table.cublasLtMatmulAlgoGetHeuristic(
                self.library.handle(),
                ptr::with_exposed_provenance_mut(self.desc),
                layout(self.a),
                layout(self.b),
                layout(self.residual),
                layout(self.c),
                preference.handle,
                1,
                result.as_mut_ptr(),
                &mut found,
            )
        }?;
        if found < 1 {
            let kernel = "cublasLtMatmulAlgoGetHeuristic";
            return Err(KernelError::Unsupported { kernel, device: "cuBLASLt" });
        }
        // SAFETY: one result was written; only its algorithm is read, which is eight numbers. (Its state is an enum to which a
        // newer library may add values.)
        Ok(unsafe { (&raw const (*result.as_ptr()).algo).read() })
    }
}

/// Creates the layout descriptor of a batch of matrices.
fn layout(
    table: &Table,
    dtype: cudaDataType,
    [g, rows, columns]: [usize; 3],
    operand: Operand,
) -> Result<usize, KernelError> {
    use cublasLtMatrixLayoutAttribute_t as A;
    let (rows, columns) = if operand.transposed { (columns, rows) } else { (rows, columns) };
    let mut made = ptr::null_mut();
    let (count, step) = (g as i32, operand.batch_stride as i64);
    // SAFETY: the place outlives the call; the attributes are numbers of these sizes. A descriptor whose attributes are
    // refused is destroyed here, every other by its plan.
    unsafe {
        table.cublasLtMatrixLayoutCreate(
            &mut made,
            dtype,
            rows as u64,
            columns as u64,
            operand.leading_dim as i64,
        )?;
        let set = |which: A, value: *const c_void, bytes: usize| {
            table.cublasLtMatrixLayoutSetAttribute(made, which, value, bytes)
        };
        let done = set(A::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, (&raw const count).cast(), size_of::<i32>())
            .and_then(|()| {
                let which = A::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET;
                set(which, (&raw const step).cast(), size_of::<i64>())
            });
        if let Err(error) = done {
            let _ = table.cublasLtMatrixLayoutDestroy(made);
            return Err(error);
        }
    }
    Ok(made.expose_provenance())
}

impl Drop for MatmulPlan {
    fn drop(&mut self) {
        let table = &self.library.table;
        let own = if self.residual == self.c { 0 } else { self.residual };
        for handle in [self.a, self.b, self.c, own].into_iter().filter(|h| *h != 0) {
            // SAFETY: created once, destroyed once.
            let _ = unsafe { table.cublasLtMatrixLayoutDestroy(ptr::with_exposed_provenance_mut(handle)) };
        }
        if self.desc != 0 {
            // SAFETY: created once, destroyed once.
            let _ = unsafe { table.cublasLtMatmulDescDestroy(ptr::with_exposed_provenance_mut(self.desc)) };
        }
    }
}

/// The constraints on the choice of an algorithm.
struct Preference<'a> {
    table: &'a Table,
    handle: cublasLtMatmulPreference_t,
}

impl<'a> Preference<'a> {
    fn new(table: &'a Table) -> Result<Preference<'a>, KernelError> {
        let mut handle = ptr::null_mut();
        // SAFETY: the place outlives the call; destroyed once, when this is dropped.
        unsafe { table.cublasLtMatmulPreferenceCreate(&mut handle) }?;
        Ok(Preference { table, handle })
    }

    fn set<T>(&self, which: cublasLtMatmulPreferenceAttributes_t, value: &T) -> Result<(), KernelError> {
        // SAFETY: the stated size is that of the value, and the library compares it with the attribute's.
        unsafe {
            self.table.cublasLtMatmulPreferenceSetAttribute(
                self.handle,
                which,
                ptr::from_ref(value).cast(),
                size_of::<T>(),
            )
        }
    }
}

impl Drop for Preference<'_> {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once.
        let _ = unsafe { self.table.cublasLtMatmulPreferenceDestroy(self.handle) };
    }
}
