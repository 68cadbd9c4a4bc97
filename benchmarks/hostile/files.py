"""The host's files, environment and packages."""

from __future__ import annotations

from pathlib import Path

from benchmarks.hostile.program import HIDDEN_SECRET, Hostile, attempt

_OPENED = (
    *("/proc/1", "/proc/self/mem", "/proc/self/maps", "/proc/self/exe", "/proc/sys/kernel/hostname"),
    *("/sys/kernel", "/sys/fs/cgroup", "/dev/fd", "/dev/stdin", "/dev/stdout", "/dev/shm", "/dev/pts"),
    *("/dev/sda", "/dev/vda", "/dev/mem", "/dev/kmsg", "/dev/tty", "/dev/console", "/dev/ptmx", "/dev/kvm"),
    *("/dev/zero", "/dev/fuse", "/dev/net/tun", "/dev/loop-control", "/dev/userfaultfd", "/dev/nvidia0"),
    *("/etc/passwd", "/etc/shadow", "/etc/hosts", "/etc/resolv.conf", "/run", "/var", "/home", "/boot"),
)

PROGRAMS: dict[str, Hostile] = {
    "read the home": attempt(f"os.listdir({str(Path.home())!r} + '/.ssh/..')\nopen('CANARY').read()"),
    "read the environment": Hostile(
        "import os, glob\nfound = ' '.join(os.environ.values())\n"
        "for path in glob.glob('/proc/*/environ'): found += open(path, errors='replace').read()\n"
        f"print('ESCAPED' if {HIDDEN_SECRET} in found else 'nothing')"
    ),
    "read other processes": attempt(
        "os.listdir('/proc/1')\nopen('/proc/1/mem', 'rb')\nopen('/proc/HOST/environ').read()"
    ),
    "read the system": attempt("\n".join(f"os.open({path!r}, os.O_RDONLY)" for path in _OPENED)),
    "import what is installed": attempt(
        "\n".join(
            f"import {name}"
            for name in ("tether", "numpy", "torch", "pytest", "pip", "setuptools", "launcher")
        )
    ),
    "import after a search": attempt(
        "sys.path[:0] = [p for p, _, _ in os.walk('/')]; import tether\nimport site; import numpy\n"
        "sys.path.insert(0, 'SOURCE'); import tether\nimport runpy; runpy.run_module('tether.cli')",
        "import os, sys\n",
    ),
    "walk through all files": Hostile(
        "import os\nfor folder, folders, files in os.walk('/'):\n"
        "    if os.path.basename(folder) in ('site-packages', 'dist-packages') and folders + files:\n"
        "        print('ESCAPED', folder, folders, files)\n"
        "    for name in folders + files:\n"
        "        if name.startswith(('tether', '__editable__', 'launcher')) or name == 'canary':\n"
        "            print('ESCAPED', folder, name)"
    ),
    "write outside": attempt(
        "open('CANARY', 'w').write('x')\nopen('/usr/lib/tether-was-here', 'w')\n"
        "os.mkdir('/tether-was-here')\nopen('/etc/ld.so.cache', 'r+b')\nopen(os.__file__, 'r+')\n"
        "open('/dev/shm/tether-was-here', 'w')\nos.mknod('/dev/x')\nos.mkdir('/dev/x')\n"
        "os.chmod(os.__file__, 0o777)\nos.remove(os.__file__)\nos.truncate(os.__file__, 0)"
    ),
    "change the attributes of outside": attempt(
        "os.utime('/')\nos.chmod('/', 0o777)\nos.chown('/', 0, 0)\nos.utime(os.__file__)\n"
        "os.chmod('/dev/null', 0)\n"
        "os.chown('/tmp', 0, 0)\nos.chmod('/tmp', 0o777)\nos.setxattr(os.__file__, 'user.x', b'x')"
    ),
    "write through links": attempt(
        "os.symlink('CANARY', '/tmp/link'); open('/tmp/link', 'w').write('x')\n"
        "os.link(os.__file__, '/tmp/hard'); open('/tmp/hard', 'r+')\n"
        "os.symlink('/../../..' + 'CANARY', '/tmp/up'); open('/tmp/up').read()\n"
        "os.symlink(os.path.dirname('CANARY'), '/tmp/folder'); os.listdir('/tmp/folder')\n"
        "os.rename('/tmp', '/tmp2')\nos.symlink('/tmp', '/usr/lib/tether-was-here')\nos.rmdir('/tmp')"
    ),
    "write through a shared map": attempt(
        "mmap.mmap(os.open(os.__file__, os.O_RDWR), 0)\n"
        "mmap.mmap(os.open(os.__file__, os.O_RDONLY), 0, mmap.MAP_SHARED, mmap.PROT_WRITE)",
        "import mmap, os\n",
    ),
    "leave the root": attempt(
        "os.chroot('/tmp')\nos.open('..', os.O_RDONLY, dir_fd=99)\nos.fchdir(3)\n"
        "os.stat('/tmp/../../../../CANARY')\nos.open('/tmp/.././../proc/self', os.O_PATH)"
    ),
    "devices and fifos": attempt(
        "os.mknod('/tmp/n', 0o600)\nos.mknod('/tmp/d', 0o20666, os.makedev(1, 1))\n"
        "os.mknod('/tmp/b', 0o60666, os.makedev(8, 0))\nos.mkfifo('/tmp/f')"
    ),
    "rights from files": Hostile(
        "import os, shutil, subprocess, sys\nshutil.copy(sys.executable, '/tmp/p')\n"
        "os.chmod('/tmp/p', 0o6755)\n"
        "code = 'import os; print(len({*os.getresuid(), *os.getresgid()}) > 2 or 0 in os.getresuid())'\n"
        "told = subprocess.run(['/tmp/p', '-Sc', code], capture_output=True, text=True).stdout\n"
        "if 'True' in told: print('ESCAPED')",
        ("ok", "error"),
    ),
    "a program that cannot be read": Hostile(
        "import os, shutil, sys, time\nshutil.copy(sys.executable, '/tmp/p')\nos.chmod('/tmp/p', 0o111)\n"
        "for _ in range(8):\n    if os.fork() == 0:\n        os.execv('/tmp/p', ['/tmp/p', '-Sc', "
        "'import time; x = b\"x\" * (60 * 2**20); time.sleep(60)'])\ntime.sleep(60)",
        ("memory", "killed", "timeout", "error"),
    ),
    "more rights by exec": attempt(
        "os.execv('/usr/bin/sudo', ['sudo', 'id'])\nos.execv('/bin/su', ['su'])\n"
        "os.setgid(0)\nos.setuid(0)\nos.setgroups([0])\nos.setresuid(0, 0, 0)\nos.setreuid(1000, 1000)"
    ),
    "inherited descriptors": Hostile(
        "import os\nfor n in range(3, 1024):\n    try: os.fstat(n); print('ESCAPED', n)\n"
        "    except OSError: pass"
    ),
    "code in a writable file": Hostile(
        "import mmap\nwith open('/tmp/x', 'w+b') as f:\n    f.write(b'\\xc3' * 4096); f.flush()\n"
        "    mmap.mmap(f.fileno(), 4096, prot=7)\nprint('harmless')"
    ),
}
