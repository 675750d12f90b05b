//! Stacks of products by cuBLASLt: how they are described to it, which algorithm it chooses for them (once), and the call.
//! Sums are formed in f32 for f32 and narrower, and in f64 for f64; operands of f32 are rounded to TF32 only where a
//! [`MatmulPrecision`] gives leave.

use super::driver::Stream;
use super::library::{BLAS, Library, SearchPaths, StatusCode, foreign};
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

foreign!(Table, BLAS, cudarc::cublaslt::sys, cublasStatus_t {
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

/// The library has nothing for what is asked.
const NOT_SUPPORTED: StatusCode = 15;

impl Table {
    fn failed(&self, call: &'static str, answer: StatusCode) -> KernelError {
        if answer == NOT_SUPPORTED {
            return KernelError::Unsupported { kernel: call, device: "cuBLASLt" };
        }
        KernelError::Device { call, why: format!("cuBLASLt answers {answer}"), is_permanent: false }
    }
}

/// A stack of products that the library knows how to do: c = a b, (g, m, n) = (g, m, k) (g, k, n), to which a matrix like c may be
/// added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct MatmulDesc {
    pub(super) dtype: DType,
    pub(super) extents: [usize; 4],
    pub(super) a: Operand,
    pub(super) b: Operand,
    pub(super) c: Operand,
    /// What is added to the product; its lines lie as those of c.
    pub(super) added: Option<Operand>,
    /// Other than plain only where the rows of c lie behind each other: what is added then goes along those of the library.
    pub(super) epilogue: cublasLtEpilogue_t,
}

/// What lies epilogue_operands a product, as addresses; 0 where there is nothing.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct EpilogueOperands {
    /// A number for each column of c: read or written, as the epilogue says.
    pub(super) columns: u64,
    /// A matrix like c, whose rows lie behind each other.
    pub(super) whole: u64,
    /// Another, which is added to the product.
    pub(super) added: u64,
}

impl MatmulDesc {
    /// The same task with a result whose columns lie together: its transpose is b's transpose times a's.
    fn column_major(self) -> (MatmulDesc, bool) {
        if !self.c.transposed {
            return (self, false);
        }
        let [g, m, n, k] = self.extents;
        let (a, b, c) = (self.b.transposed(), self.a.transposed(), self.c.transposed());
        (
            MatmulDesc { extents: [g, n, m, k], a, b, c, added: self.added.map(Operand::transposed), ..self },
            true,
        )
    }
}

/// The library of products on this machine.
#[derive(Debug)]
pub(super) struct CublasLt {
    table: Table,
    handle: usize,
}

impl CublasLt {
    /// Finds the library, and asks for its version.
    fn find(places: &SearchPaths) -> Result<(Library, usize), KernelError> {
        let library = places.open(&BLAS)?;
        // SAFETY: the bindings state this type; it takes nothing.
        let version = unsafe {
            let ask: unsafe extern "C" fn() -> usize = library.function(&BLAS, "cublasLtGetVersion")?;
            ask()
        };
        BLAS.check(version, &shown(version), library.file())?;
        Ok((library, version))
    }

    /// The file that would be opened, and its version.
    pub(super) fn look(places: &SearchPaths) -> Result<String, KernelError> {
        let (library, version) = CublasLt::find(places)?;
        Ok(format!("{} ({})", library.file().display(), shown(version)))
    }

    /// Opens the library. A context must be current on this thread.
    pub(super) fn open(places: &SearchPaths) -> Result<Arc<CublasLt>, KernelError> {
        let (library, _) = CublasLt::find(places)?;
        let table = Table::load(library)?;
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

/// Descriptions and algorithm of a task. Nothing of it changes after it is made.
#[derive(Debug)]
struct Planned {
    products: Arc<CublasLt>,
    product: usize,
    a: usize,
    b: usize,
    c: usize,
    /// That of c where nothing is added.
    added: usize,
    algorithm: cublasLtMatmulAlgo_t,
}

/// The products of one stream: tasks that were planned, by what they are.
#[derive(Debug)]
pub(super) struct MatmulPlanner {
    products: Arc<CublasLt>,
    precision: MatmulPrecision,
    /// Nothing, where the library has no algorithm.
    planned: HashMap<MatmulDesc, Option<Planned>>,
}

/// Memory that an algorithm may use.
pub(super) const WORKSPACE_BYTES: usize = 32 << 20;

/// Sums over parts of k are added up in the type of the sums, in a fixed order, or not cut into parts.
const REDUCTIONS: u32 = 2;

impl MatmulPlanner {
    /// CublasLt of f32 are formed as exactly as a precision says.
    pub(super) fn new(library: &Arc<CublasLt>, precision: MatmulPrecision) -> MatmulPlanner {
        MatmulPlanner { products: library.clone(), precision, planned: HashMap::new() }
    }

    /// Gives a task to a stream: addresses of a, b and c, of what lies epilogue_operands them, and a workspace that only this stream uses.
    ///
    /// # Errors
    /// [`KernelError::Unsupported`] where the library has no algorithm; nothing is done then.
    pub(super) fn run(
        &mut self,
        stream: &Stream,
        task: MatmulDesc,
        ([a, b, c], epilogue_operands): ([u64; 3], EpilogueOperands),
        workspace: &Buffer,
    ) -> Result<(), KernelError> {
        stream.context().bound()?;
        let (task, swapped) = task.column_major();
        let (a, b) = if swapped { (b, a) } else { (a, b) };
        if !self.planned.contains_key(&task) {
            let planned = match Planned::new(&self.products, &task, epilogue_operands, self.precision) {
                Err(KernelError::Unsupported { .. }) => None,
                planned => Some(planned?),
            };
            self.planned.insert(task, planned);
        }
        let Some(planned) = &self.planned[&task] else {
            return Err(KernelError::Unsupported { kernel: "cublasLtMatmul", device: "cuBLASLt" });
        };
        planned.point(&task, epilogue_operands)?;
        // Scales are f64 for f64 and f32 otherwise; both begin with the same bytes where they are 0.
        let (one, zero) = (1f64, 0f64);
        let (narrow_one, is_wide) = (1f32, task.dtype == DType::F64);
        let alpha: *const c_void =
            if is_wide { (&raw const one).cast() } else { (&raw const narrow_one).cast() };
        let (beta, added) = match task.added {
            Some(_) => (alpha, epilogue_operands.added),
            None => ((&raw const zero).cast(), c),
        };
        let at = |address: u64| ptr::with_exposed_provenance_mut::<c_void>(address as usize);
        let layout = |handle: usize| -> cublasLtMatrixLayout_t { ptr::with_exposed_provenance_mut(handle) };
        // SAFETY: the descriptions are alive and those of the operands; the scales outlive the call, which reads them on
        // the host. The addresses are those of operands that were compared with their views, in memory that goes back to an
        // allocator of this very stream.
        unsafe {
            self.products.table.cublasLtMatmul(
                self.products.handle(),
                ptr::with_exposed_provenance_mut(planned.product),
                alpha,
                at(a),
                layout(planned.a),
                at(b),
                layout(planned.b),
                beta,
                at(added),
                layout(planned.added),
                at(c),
                layout(planned.c),
                &planned.algorithm,
                at(workspace.device_address().expect("the workspace is of the card")),
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

impl Planned {
    fn new(
        library: &Arc<CublasLt>,
        task: &MatmulDesc,
        epilogue_operands: EpilogueOperands,
        precision: MatmulPrecision,
    ) -> Result<Planned, KernelError> {
        use cublasLtMatmulDescAttributes_t as D;
        let table = &library.table;
        let (compute, scale, dtype) = data_type(task.dtype, precision)?;
        let [g, m, n, k] = task.extents;
        // What is made is handed over at once, so that it is destroyed whatever fails after it.
        let mut planned = Planned {
            products: library.clone(),
            product: 0,
            a: 0,
            b: 0,
            c: 0,
            added: 0,
            algorithm: cublasLtMatmulAlgo_t { data: [0; 8] },
        };
        let mut product = ptr::null_mut();
        // SAFETY: the place outlives the call; destroyed once, with what is planned.
        unsafe { table.cublasLtMatmulDescCreate(&mut product, compute, scale) }?;
        planned.product = product.expose_provenance();
        planned.set(D::CUBLASLT_MATMUL_DESC_TRANSA, &i32::from(task.a.transposed))?;
        planned.set(D::CUBLASLT_MATMUL_DESC_TRANSB, &i32::from(task.b.transposed))?;
        planned.set(D::CUBLASLT_MATMUL_DESC_EPILOGUE, &(task.epilogue as u32))?;
        planned.point(task, epilogue_operands)?;
        planned.a = layout(table, dtype, [g, m, k], task.a)?;
        planned.b = layout(table, dtype, [g, k, n], task.b)?;
        planned.c = layout(table, dtype, [g, m, n], task.c)?;
        planned.added = match task.added {
            Some(added) => layout(table, dtype, [g, m, n], added)?,
            None => planned.c,
        };
        planned.algorithm = planned.choose(task)?;
        Ok(planned)
    }

    /// Tells the description one of its attributes.
    fn set<T>(&self, which: cublasLtMatmulDescAttributes_t, value: &T) -> Result<(), KernelError> {
        let product = ptr::with_exposed_provenance_mut(self.product);
        // SAFETY: the value is of the size that is said, which the library compares with the attribute's; the description
        // is alive.
        unsafe {
            self.products.table.cublasLtMatmulDescSetAttribute(
                product,
                which,
                ptr::from_ref(value).cast(),
                size_of::<T>(),
            )
        }
    }

    /// Tells the description where lies what its epilogue reads and writes.
    fn point(&self, task: &MatmulDesc, epilogue_operands: EpilogueOperands) -> Result<(), KernelError> {
        use cublasLtMatmulDescAttributes_t as D;
        if epilogue_operands.columns != 0 {
            self.set(D::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &epilogue_operands.columns)?;
        }
        if epilogue_operands.whole != 0 {
            self.set(D::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &epilogue_operands.whole)?;
            self.set(D::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &(task.c.lead as i64))?;
            let step = task.c.step as i64;
            self.set(D::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE, &step)?;
        }
        Ok(())
    }

    /// The library's first choice among algorithms that fit the workspace and the alignments and whose sums have one order.
    fn choose(&self, task: &MatmulDesc) -> Result<cublasLtMatmulAlgo_t, KernelError> {
        use cublasLtMatmulPreferenceAttributes_t as P;
        let table = &self.products.table;
        let preference = Preference::new(table)?;
        preference.set(P::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &(WORKSPACE_BYTES as u64))?;
        preference.set(P::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &REDUCTIONS)?;
        preference.set(P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &task.a.alignment)?;
        preference.set(P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &task.b.alignment)?;
        let added = task.added.unwrap_or(task.c);
        preference.set(P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &added.alignment)?;
        preference.set(P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &task.c.alignment)?;
        let mut result = MaybeUninit::<cublasLtMatmulHeuristicResult_t>::zeroed();
        let mut found = 0;
        let layout = |handle: usize| -> cublasLtMatrixLayout_t { ptr::with_exposed_provenance_mut(handle) };
        // SAFETY: all descriptions are alive; there is room for the one result that is asked for.
        unsafe {
            table.cublasLtMatmulAlgoGetHeuristic(
                self.products.handle(),
                ptr::with_exposed_provenance_mut(self.product),
                layout(self.a),
                layout(self.b),
                layout(self.added),
                layout(self.c),
                preference.handle,
                1,
                result.as_mut_ptr(),
                &mut found,
            )
        }?;
        let is_plain = task.epilogue == cublasLtEpilogue_t::CUBLASLT_EPILOGUE_DEFAULT && task.added.is_none();
        if found < 1 && !is_plain {
            let kernel = "cublasLtMatmulAlgoGetHeuristic";
            return Err(KernelError::Unsupported { kernel, device: "cuBLASLt" });
        }
        if found < 1 {
            let why = format!("cuBLASLt has no algorithm for {task:?}");
            return Err(KernelError::Device {
                call: "cublasLtMatmulAlgoGetHeuristic",
                why,
                is_permanent: false,
            });
        }
        // SAFETY: one result was written; only its algorithm is read, which is eight numbers. (Its state is an enum that a
        // newer library may have more values of.)
        Ok(unsafe { (&raw const (*result.as_ptr()).algo).read() })
    }
}

/// A stack of matrices as the library describes it.
fn layout(
    table: &Table,
    dtype: cudaDataType,
    [g, rows, columns]: [usize; 3],
    operand: Operand,
) -> Result<usize, KernelError> {
    use cublasLtMatrixLayoutAttribute_t as A;
    let (rows, columns) = if operand.transposed { (columns, rows) } else { (rows, columns) };
    let mut made = ptr::null_mut();
    let (count, step) = (g as i32, operand.step as i64);
    // SAFETY: the place outlives the call; the attributes are numbers of these sizes. A description whose attributes are
    // refused is destroyed here, and others by whoever gets them.
    unsafe {
        table.cublasLtMatrixLayoutCreate(
            &mut made,
            dtype,
            rows as u64,
            columns as u64,
            operand.lead as i64,
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

impl Drop for Planned {
    fn drop(&mut self) {
        let table = &self.products.table;
        let own = if self.added == self.c { 0 } else { self.added };
        for handle in [self.a, self.b, self.c, own].into_iter().filter(|h| *h != 0) {
            // SAFETY: created once, destroyed once.
            let _ = unsafe { table.cublasLtMatrixLayoutDestroy(ptr::with_exposed_provenance_mut(handle)) };
        }
        if self.product != 0 {
            // SAFETY: created once, destroyed once.
            let _ =
                unsafe { table.cublasLtMatmulDescDestroy(ptr::with_exposed_provenance_mut(self.product)) };
        }
    }
}

/// What the library has to keep to when it chooses.
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
        // SAFETY: the value is a number of the size that is said; the library compares that with the attribute's.
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
