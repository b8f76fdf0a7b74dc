//! Opens a library that contains the writer: `opener LOG THREADS LIBRARY`.

use std::ffi::CString;

fn main() {
    let path = CString::new(std::env::args().nth(3).unwrap()).unwrap();
    unsafe {
        let library = libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL);
        assert!(!library.is_null());
        let run = libc::dlsym(library, c"run_program".as_ptr());
        assert!(!run.is_null());
        std::mem::transmute::<*mut libc::c_void, extern "C" fn()>(run)();
    }
}
