import com.datadoghq.profiler.JavaProfiler;
import com.datadoghq.profiler.OTelContext;
import java.io.IOException;
import java.io.OutputStream;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.SplittableRandom;
import java.util.concurrent.locks.LockSupport;

/**
 * Threads that change their contexts at random, and log the times, until the input ends.
 *
 * <p>{@code Program LOG THREADS LIBRARY OFFSET}: OFFSET is added to the monotonic clock, for times
 * since the boot.
 */
public final class Program {
    private static final int MOST = 60_000;
    private static volatile boolean stop;
    private static volatile long result;
    private static long offset;
    private static JavaProfiler profiler;

    /** The times at which a context is not yet published, published, about to end, and ended. */
    private static final class Line {
        long from, since, until, end, high, low, span;
    }

    private static long now() {
        return System.nanoTime() + offset;
    }

    private static void work(SplittableRandom random) {
        long end = now() + random.nextLong(2_000_000);
        int kind = random.nextInt(8);
        if (kind == 0) {
            LockSupport.parkNanos(random.nextLong(3_000_000));
            return;
        }
        long sum = 0;
        StringBuilder text = new StringBuilder();
        while (now() < end) {
            if (kind < 4) { // garbage to collect
                text = new StringBuilder().append(sum).append(text.length());
            }
            for (int i = 0; i < 100; i++) {
                sum = sum * 31 + i;
            }
        }
        result = sum;
    }

    private static void run(long number, List<Line> lines) {
        SplittableRandom random = new SplittableRandom(number);
        Line last = null;
        while (!stop && lines.size() < MOST) {
            long until = now();
            if (random.nextInt(4) == 0) {
                profiler.clearTraceContext();
                if (last != null) {
                    last.until = until;
                    last.end = now();
                }
                last = null;
                work(random);
                continue;
            }
            Line line = new Line();
            line.high = random.nextLong() | 1;
            line.low = number;
            line.span = random.nextLong() | 1;
            String hex = String.format("%016x", line.span);
            line.from = now();
            profiler.setTraceContext(line.span, line.span, line.high, line.low, 0, hex, -1, null);
            line.since = now();
            line.until = line.end = Long.MAX_VALUE;
            if (last != null) {
                last.until = until;
                last.end = line.since;
            }
            last = line;
            lines.add(line);
            work(random);
        }
        long until = now();
        profiler.clearTraceContext();
        if (last != null) {
            last.until = until;
            last.end = now();
        }
    }

    private static long readThreadId() {
        try {
            Path link = Files.readSymbolicLink(Path.of("/proc/thread-self"));
            return Long.parseLong(link.getFileName().toString());
        } catch (IOException error) {
            throw new java.io.UncheckedIOException(error);
        }
    }

    public static void main(String[] words) throws Exception {
        int threads = Integer.parseInt(words[1]);
        offset = Long.parseLong(words[3]);
        profiler = JavaProfiler.getInstance(words[2], null);
        OTelContext context = new OTelContext(words[2], null, error -> error.printStackTrace());
        String[] names = {"span.hex"};
        context.initializeAllContext("test", "host", "1", "native", "1", "1", names);
        System.out.println("ready");
        List<Thread> started = new ArrayList<>();
        long[] ids = new long[threads];
        List<List<Line>> logs = new ArrayList<>();
        for (int i = 0; i < threads; i++) {
            int number = i;
            logs.add(new ArrayList<>());
            started.add(new Thread(() -> {
                ids[number] = readThreadId();
                run(number + 1, logs.get(number));
            }, "program"));
            started.get(i).start();
        }
        while (System.in.read() != -1) {
            continue;
        }
        stop = true;
        try (OutputStream out = Files.newOutputStream(Path.of(words[0]))) {
            for (int i = 0; i < threads; i++) {
                started.get(i).join();
                ByteBuffer buffer = ByteBuffer.allocate(64 * logs.get(i).size());
                for (Line line : logs.get(i)) {
                    buffer.order(ByteOrder.nativeOrder());
                    buffer.putLong(line.from).putLong(line.since).putLong(line.until);
                    buffer.putLong(line.end).putLong(ids[i]);
                    buffer.order(ByteOrder.BIG_ENDIAN);
                    buffer.putLong(line.high).putLong(line.low).putLong(line.span);
                }
                out.write(buffer.array());
            }
        }
        System.out.println("done");
    }
}
